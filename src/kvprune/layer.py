"""One pruned layer: its interaction, and what the last forward pass left behind."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvprune import host
from kvprune.config import Config, PruningConfig
from kvprune.errors import PruneError
from kvprune.interaction import Interaction
from kvprune.ops.timeline import Timeline, make_timeline


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
            config = self.config
            protect = (
                (config.protect_first, config.protect_recent)
                if isinstance(config, PruningConfig)
                else ()
            )
            self._last = (mask, shape, device, make_timeline(mask, shape, device, *protect))
        timeline: Timeline = self._last[3]
        return timeline

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": ()}


class Layer:
    """State of one layer: overwritten at every pass, as checkpointing runs it twice."""

    def __init__(
        self, name: str, settings: Settings, interaction: Interaction | None, below: list[Layer]
    ):
        self.name, self.settings, self.interaction = name, settings, interaction
        self.below = below  # the pruned layers under this one
        self._forget()

    def _forget(self) -> None:
        self.hidden: Tensor | None = None
        self.votes: tuple[Tensor, Tensor, Tensor] | None = None  # only when tied with depth
        self.drop_step: Tensor | None = None  # (B, T), after a hard pass
        self.kept: Tensor | None = None  # (B,) sum of keep over pairs, of the last pass
        self.pairs: Tensor | None = None  # (B,)
        self.training_kept: Tensor | None = None  # the same of the last training pass, with graph
        self.training_pairs: Tensor | None = None

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: the attention function is not given the hidden states."""
        self.hidden = host.hidden_states(args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: nobody took the hidden states, so nothing was pruned."""
        if self.hidden is not None:
            self.hidden = None
            raise PruneError(
                f"{self.name} did not use kvprune's attention: the model's attention "
                f"implementation was set to {module.config._attn_implementation!r} "  # type: ignore[union-attr]
                f"after attach. Detach first, or leave it alone"
            )

    def take_hidden(self) -> Tensor:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None, "the attention function ran without its pre-hook"
        return hidden

    def record(
        self, kept: Tensor, timeline: Timeline, training: bool, drop_step: Tensor | None
    ) -> None:
        self.kept, self.pairs, self.drop_step = kept.detach(), timeline.pairs(), drop_step
        if training:
            self.training_kept, self.training_pairs = kept, self.pairs

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a model starts with no memory of a forward pass; graphs cannot be copied
        copy = Layer(self.name, self.settings, self.interaction, self.below)
        return dict(copy.__dict__)


def layer_of(module: nn.Module) -> Layer | None:
    return module.__dict__.get("_kvprune")


def share(kept: Tensor, pairs: Tensor) -> Tensor:
    """kept / pairs over the whole batch; a batch without pairs keeps everything."""
    total = pairs.sum()
    return torch.where(total > 0, kept.sum() / total.clamp(min=1), 1.0)
