"""When each token was dropped: what `PrunedCache(record=True)` keeps per layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprune.ops.never import NEVER


class Record:
    """Drop steps by position of real tokens, for every row."""

    def __init__(self) -> None:
        self.step = torch.empty(0, 0, dtype=torch.long)  # (B, tokens), NEVER if it is kept

    def note(self, token: Tensor, dropper: Tensor, length: int) -> None:
        """The tokens (B, K) left with the droppers (B, K) or (B, 1); -1 is no token."""
        B, old = len(token), self.step.shape[1]
        step = torch.full((B, max(length, old) + 1), NEVER)
        step[:, :old] = self.step if old else step[:, :0]
        # -1 writes to the last column, which is cut off again
        step.scatter_(1, token.cpu() % step.shape[1], dropper.cpu().expand_as(token))
        self.step = step[:, :-1]

    def crop(self, remove: int) -> None:
        """Forget the last tokens, and what they dropped."""
        self.step = self.step[:, : self.step.shape[1] - remove].clone()
        self.step[self.step >= self.step.shape[1]] = NEVER

    def add_row(self, step: Tensor) -> None:
        """One more row, with these drop steps (tokens,)."""
        length = max(self.step.shape[1], len(step))
        rows = [*self.step, step.cpu()]
        self.step = torch.stack([F.pad(row, (0, length - len(row)), value=NEVER) for row in rows])

    def select(self, rows: Tensor) -> None:
        self.step = self.step[rows.cpu()]
