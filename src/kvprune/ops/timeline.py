"""When each token of a row may vote, be seen and be voted out: three integers per token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kvprune.ops.never import NEVER as NEVER


@dataclass(frozen=True)
class Timeline:
    """Which token may vote on which, shared by all layers.

    T queries, and as keys the same tokens after P older ones (P = 0 without a cache).
    Positions count real tokens only, so a padded row obeys the same rules as the row alone.
    Query k sees key j       iff  clock[k] ≥ visible_from[j]
    Query k's vote on j counts iff  clock[k] ≥ votable_from[j]
    """

    clock: Tensor  # (B, T) int32, the query's position; -1 for a pad: it neither sees nor votes
    visible_from: Tensor  # (B, P + T) int32, the key's position; NEVER for a pad or a free slot
    votable_from: Tensor  # (B, P + T) int32, NEVER for a pad or a protected token
    padded: bool

    @cached_property
    def now(self) -> Tensor:
        """The position of the first query: (B,), for a pass of one token."""
        return self.clock[:, 0].long()

    @cached_property
    def active(self) -> Tensor | None:
        """Rows whose first query is a real token: (B,); None if all are."""
        return self.now >= 0 if self.padded else None

    @property
    def past(self) -> int:
        return self.visible_from.shape[-1] - self.clock.shape[-1]

    @property
    def index(self) -> Tensor:
        """The keys by the queries' numbers: (P + T,), negative for those of a cache."""
        P, T = self.past, self.clock.shape[-1]
        return torch.arange(-P, T, device=self.clock.device)

    def rows(self, rows: slice) -> Timeline:
        return Timeline(
            self.clock[rows], self.visible_from[rows], self.votable_from[rows], self.padded
        )

    def pairs(self) -> Tensor:
        """How many pairs of a real query and an earlier real token each row has: (B,)."""
        return self.clock.clamp(min=0).sum(-1)

    def after(self, token: Tensor, valid: Tensor, rules: Protection) -> Timeline:
        """The same queries with the keys of a cache before them: token, valid (B, P)."""
        position = token.int().where(valid, NEVER)
        votable = rules.votable_from(token.int()).where(valid, NEVER)
        return replace(
            self,
            visible_from=torch.cat([position, self.visible_from], -1),
            votable_from=torch.cat([votable, self.votable_from], -1),
        )


@dataclass(frozen=True)
class Protection:
    """Tokens that cannot be dropped: the first of a row, and the most recent ones."""

    first: int = 0
    recent: int = 0

    def votable_from(self, position: Tensor) -> Tensor:
        votable = position + (self.recent + 1)
        return votable.where(position >= self.first, NEVER) if self.first else votable


def would_wait(x: Tensor, T: int) -> bool:
    """Whether a look at x costs more than it can save: for a single token, the wait for a GPU."""
    return x.device.type != "cpu" and T == 1


def make_timeline(
    real: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    rules: Protection | None = None,
    start: Tensor | int = 0,
) -> Timeline:
    """The timeline of rows whose real tokens `real` (B, T) marks; None means all of them.

    `start` is how many real tokens each row had before: an integer, or (B,).
    """
    B, T = shape
    rules = rules or Protection()
    if real is None and isinstance(start, int):
        clock = torch.arange(start, start + T, dtype=torch.int32, device=device).expand(B, T)
        return Timeline(clock, clock, rules.votable_from(clock), padded=False)
    start = start[:, None] if isinstance(start, Tensor) else start
    # a graph cannot depend on what a tensor holds
    look = real is not None and not torch.compiler.is_compiling() and not would_wait(real, T)
    if real is None or (look and bool(real.all())):
        clock = (torch.arange(T, dtype=torch.int32, device=device) + start).int().expand(B, T)
        return Timeline(clock, clock, rules.votable_from(clock), padded=False)
    position = (real.cumsum(-1) - 1 + start).int()
    return Timeline(
        clock=position.where(real, -1),
        visible_from=position.where(real, NEVER),
        votable_from=rules.votable_from(position).where(real, NEVER),
        padded=True,
    )
