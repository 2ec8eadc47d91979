"""When each token of a row may vote, be seen and be voted out: three integers a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# larger than any position; as a drop step it means "not dropped"
NEVER = 2**31 - 1


@dataclass(frozen=True)
class Timeline:
    """The rules of who may vote on whom, told once for all layers.

    Positions count real tokens only, so a padded row obeys the same rules as the row alone.
    Token k sees token j      iff  clock[k] ≥ visible_from[j]
    Token k's vote on j counts iff clock[k] ≥ votable_from[j]
    """

    clock: Tensor  # (B, T) int32, the token's position; -1 for a pad: it sees and votes on nobody
    visible_from: Tensor  # (B, T) int32, the token's position; NEVER for a pad
    votable_from: Tensor  # (B, T) int32, NEVER for a pad or a protected token
    padded: bool

    def rows(self, rows: slice) -> Timeline:
        return Timeline(
            self.clock[rows], self.visible_from[rows], self.votable_from[rows], self.padded
        )

    def pairs(self) -> Tensor:
        """How many pairs j < k of real tokens each row has: (B,)."""
        n = (self.clock >= 0).sum(-1)
        return n * (n - 1) // 2


def make_timeline(
    real: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    protect_first: int = 0,
    protect_recent: int = 0,
) -> Timeline:
    """The timeline of rows whose real tokens `real` (B, T) marks; None means all of them."""
    B, T = shape
    if real is None or bool(real.all()):
        clock = torch.arange(T, dtype=torch.int32, device=device).expand(B, T)
        visible, padded = clock, False
    else:
        position = real.cumsum(-1, dtype=torch.int32) - 1
        clock = position.where(real, -1)
        visible, padded = position.where(real, NEVER), True
    votable = (clock + (protect_recent + 1)).where(clock >= protect_first, NEVER)
    if padded:
        votable = votable.where(clock >= 0, NEVER)
    return Timeline(clock, visible, votable, padded)
