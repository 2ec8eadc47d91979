"""One forward pass of the model: what its layers share, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvprune.cache.layer import PrunedLayer
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.integration.layer import Layer
from kvprune.methods.base import Method
from kvprune.methods.interaction import Ballot
from kvprune.ops.decode.table import Table
from kvprune.ops.form import AttentionForm
from kvprune.ops.timeline import Timeline, make_timeline


class ForwardPass:
    """Made when the model is called, handed to every attention call as a keyword argument.

    A checkpointed layer that runs a second time gets the same object, which is closed by then:
    what the pass left behind is as the first run left it.
    """

    def __init__(
        self,
        method: Method,
        alpha: float,
        hard: bool,
        training: bool,
        cache: PrunedCache | None,
        observer: Observer | None = None,
    ):
        self.method, self.alpha, self.hard, self.cache = method, alpha, hard, cache
        self.observer = observer
        self.seen = 0 if cache is None else cache.seen  # before the pass
        self.begun_by: nn.Module | None = None  # the module whose call it is
        self.outcome: Outcome | None = Outcome(training, hard)
        self._timeline: Timeline | None = None
        # what tied layers need of those below, by layer number
        self.votes: dict[int, Ballot] = {}
        self.steps: dict[int, tuple[Tensor, Tensor]] = {}  # token numbers and drop steps
        self.dropped: dict[int, Tensor] = {}  # (B, S), token numbers, in a decode step

    def timeline(self, mask: Tensor | None, query: Tensor) -> Timeline:
        """When each token may vote, be seen and be dropped; made by the first layer."""
        if self._timeline is None:
            shape, device = (query.shape[0], query.shape[2]), query.device
            protection = self.method.protection()
            if self.cache is None:
                self._timeline = make_timeline(mask, shape, device, protection)
            else:
                self._timeline = self.cache.timeline(mask, shape, device, protection)
        return self._timeline

    def store(self, layer: Layer) -> PrunedLayer | None:
        return None if self.cache is None else self.cache.store(layer.index)

    def leave(self, layer: Layer, outcome: LayerOutcome) -> None:
        if self.outcome is not None:
            self.outcome.layers[layer.number] = outcome

    def close(self) -> Outcome:
        """What the pass left behind, once: the pass itself keeps no graph and no cache alive."""
        outcome, self.outcome = self.outcome, None
        assert outcome is not None, "a pass ends once"
        self.cache, self.steps, self.dropped = None, {}, {}
        return outcome


class Observed(NamedTuple):
    """One layer's attention in a hard pass over tokens: what it was given, and what it gave."""

    layer: int  # its number among the pruned layers
    query: Tensor  # (B, Hq, T, D)
    key: Tensor  # (B, H, P + T, D)
    value: Tensor  # (B, H, P + T, Dv)
    form: AttentionForm
    drop_step: Tensor  # (B, P + T), as `Method.drop_steps` gives it
    ballot: Ballot | None
    output: Tensor  # (B, Hq, T, Dv), part of the graph if there is one


Observer = Callable[[Observed], None]


class LayerOutcome(NamedTuple):
    """How much one layer kept in a pass."""

    timeline: Timeline
    kept: Tensor | None = None  # (B,), sum of keep over pairs j < k
    drop_step: Tensor | None = None  # (B, T), after a hard pass over tokens
    table: Table | None = None  # after a decode step: counted only on demand

    def kept_pairs(self) -> Tensor:
        if self.kept is not None:
            return self.kept
        assert self.table is not None
        # the token itself is not a pair
        return self.table.kept - (self.timeline.clock >= 0).sum(-1)

    def share(self) -> Tensor:
        """kept / pairs over the whole batch; a batch without pairs keeps everything."""
        total = self.timeline.pairs().sum()
        return torch.where(total > 0, self.kept_pairs().sum() / total.clamp(min=1), 1.0)


class Outcome:
    """What a forward pass left behind, by layer number."""

    def __init__(self, training: bool, hard: bool):
        self.training, self.hard = training, hard
        self.layers: dict[int, LayerOutcome] = {}

    def ordered(self) -> list[LayerOutcome]:
        return [self.layers[number] for number in sorted(self.layers)]

    def keep_by_layer(self) -> Tensor:
        """The mean of keep over pairs j < k: (L,), with its graph."""
        shares = [layer.share() for layer in self.ordered()]
        return torch.stack([share.to(shares[0].device) for share in shares])

    def drop_step(self) -> Tensor | None:
        """When each token was dropped: (L, B, T) on the CPU; None after a soft or decode pass."""
        steps = [layer.drop_step for layer in self.ordered()]
        if not steps or any(step is None for step in steps):
            return None
        return torch.stack([step.cpu() for step in steps if step is not None])
