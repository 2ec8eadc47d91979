"""One pruned layer: its interaction, and what the last forward pass left behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvprune.cache.slots import SlotTable
from kvprune.config import Config, PruningConfig
from kvprune.errors import PruneError
from kvprune.integration import host
from kvprune.methods.interaction import Interaction
from kvprune.ops.form import AttentionForm
from kvprune.ops.timeline import Protection, Timeline, make_timeline


@dataclass
class Settings:
    """What all layers of a model share, and its user may change between forward passes."""

    config: Config
    alpha: float
    hard: bool | None = None
    _last: tuple[Any, ...] = field(default=(), repr=False, compare=False)

    def is_hard(self, training: bool) -> bool:
        if not isinstance(self.config, PruningConfig) or math.isinf(self.alpha):
            return True
        return not training if self.hard is None else self.hard

    def timeline(self, mask: Tensor | None, shape: tuple[int, int], device: Any) -> Timeline:
        """The timeline of this forward pass; made by its first layer, shared by the others."""
        if not self._last or self._last[0] is not mask or self._last[1:3] != (shape, device):
            made = make_timeline(mask, shape, device, protection(self.config))
            self._last = (mask, shape, device, made)
        timeline: Timeline = self._last[3]
        return timeline

    def forget(self) -> None:
        """Make a new timeline at the next pass: the rules have changed."""
        self._last = ()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": ()}


class Form(NamedTuple):
    """How the host model shapes its attention, and whether it trains."""

    attention: AttentionForm
    training: bool


def protection(config: Config) -> Protection:
    if isinstance(config, PruningConfig):
        return Protection(config.protect_first, config.protect_recent)
    return Protection()


class Layer:
    """State of one layer: overwritten at every pass, as checkpointing runs it twice."""

    def __init__(
        self,
        name: str,
        index: int,
        settings: Settings,
        interaction: Interaction | None,
        below: list[Layer],
    ):
        self.name, self.index = name, index
        self.settings, self.interaction = settings, interaction
        self.below = below  # the pruned layers under this one
        self._forget()

    def _forget(self) -> None:
        self.hidden: Tensor | None = None
        self.cache: Any = None
        self.dropped: Tensor | None = None  # (B, S) token numbers, after a decode step
        self.below_steps: tuple[Tensor, Tensor] | None = None  # token numbers and drop steps
        self.votes: tuple[Tensor, Tensor, Tensor] | None = None  # only when tied with depth
        self.drop_step: Tensor | None = None  # (B, T), after a hard pass
        self.kept: Tensor | None = None  # (B,) sum of keep over pairs, of the last pass
        self.pairs: Tensor | None = None  # (B,)
        self._decoded: tuple[SlotTable, Timeline] | None = None  # after a decode step
        self.training_kept: Tensor | None = None  # the same of the last training pass, with graph
        self.training_pairs: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: the attention function is given neither hidden states nor cache."""
        self.hidden, self.cache = host.hidden_states(args, kwargs), host.cache_of(kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: nobody took the hidden states, so nothing was pruned."""
        if self.hidden is not None:
            self.hidden = None
            raise PruneError(
                f"{self.name} did not use kvprune's attention: the model's attention "
                f"implementation was set to {module.config._attn_implementation!r} "  # type: ignore[union-attr]
                f"after attach. Detach first, or leave it alone"
            )

    def take(self) -> tuple[Tensor, Any]:
        """The hidden states and the cache of the call at hand, once."""
        hidden, cache = self.hidden, self.cache
        self.hidden = self.cache = None
        assert hidden is not None, "the attention function ran without its pre-hook"
        return hidden, cache

    def record(
        self, kept: Tensor, timeline: Timeline, training: bool, drop_step: Tensor | None
    ) -> None:
        self.kept, self.pairs, self.drop_step = kept.detach(), timeline.pairs(), drop_step
        self._decoded = None
        if training:
            self.training_kept, self.training_pairs = kept, self.pairs

    def record_decode(self, table: SlotTable, timeline: Timeline) -> None:
        """What a decode step left behind: counted only when somebody asks."""
        self.drop_step, self._decoded = None, (table, timeline)

    def measured(self) -> tuple[Tensor, Tensor] | None:
        """The sum of keep over pairs and the number of pairs, (B,) each; None before any pass."""
        if self._decoded is not None:
            table, timeline = self._decoded
            real = (timeline.clock >= 0).sum(-1)  # the token itself is no pair
            return table.kept - real, timeline.pairs()
        return None if self.kept is None or self.pairs is None else (self.kept, self.pairs)

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a model starts with no memory of a forward pass; graphs cannot be copied
        copy = Layer(self.name, self.index, self.settings, self.interaction, self.below)
        return dict(copy.__dict__)


def layer_of(module: nn.Module) -> Layer | None:
    return module.__dict__.get("_kvprune")


def share(kept: Tensor, pairs: Tensor) -> Tensor:
    """kept / pairs over the whole batch; a batch without pairs keeps everything."""
    total = pairs.sum()
    return torch.where(total > 0, kept.sum() / total.clamp(min=1), 1.0)
