"""Key norm (Devoto et al., 2024): the keys with the lowest norm stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvprune.methods.base import Method, Reading, remove_one
from kvprune.ops.never import NEVER
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    from torch import Tensor

    from kvprune.ops.decode.table import Table

NORM = "norm"  # of the key, mean over the layer's heads
BLOCK = 256  # queries that are looked at together


@dataclass(frozen=True)
class KeyNormConfig(Method):
    """Training-free: over the budget, the token whose key has the largest norm leaves (key norm).

    The original chooses per head; here the heads of a layer share their slots, so the mean norm
    decides. Of equal norms the older token leaves.
    """

    method: ClassVar[str] = "keynorm"
    evicts: ClassVar[bool] = True
    reversible: ClassVar[bool] = False

    budget: Annotated[int, "how many tokens a layer may hold"]

    def __post_init__(self) -> None:
        check_number(self, "budget", at_least=1, integer=True)

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        return {NORM: ()}

    def new_columns(self, key: Tensor) -> dict[str, Tensor]:
        # equal tokens have keys of equal norm, rotated or not, up to rounding; with 8 bits they
        # are equal, and the choice among them does not hang on how a product was computed
        norm = key.float().norm(dim=-1).mean(1)
        return {NORM: norm.bfloat16().float()}

    def drop_steps(self, reading: Reading) -> Tensor:
        """The keys held after query k are the `budget` lowest of all that came up to it.

        So key j leaves after the first query at which `budget` lower ones are there.
        """
        import torch

        timeline, P = reading.timeline, reading.timeline.past
        steps = super().drop_steps(reading)
        norm, token = reading.columns[NORM], reading.token
        for row in range(len(steps)):
            held = (timeline.visible_from[row, :P] < NEVER).nonzero()[:, 0]
            for start in range(0, reading.query.shape[2], BLOCK):
                new = P + start + (timeline.clock[row, start : start + BLOCK] >= 0).nonzero()[:, 0]
                keys = torch.cat([held, new])
                value, age = norm[row, keys], token[row, keys]
                # lower[i, j]: key i outlives key j
                same = (value[:, None] == value) & (age[:, None] > age)
                lower = (value[:, None] < value) | same
                before, after = lower.split([len(held), len(new)])
                count = before.sum(0) + after.cumsum(0)  # (new, keys), after each new key
                # a key that has not come yet cannot leave
                there = new[:, None] >= keys
                leaves = (count >= self.budget) & there
                gone = leaves.any(0)
                first = leaves.int().argmax(0) if len(new) else gone.int()
                steps[row, keys[gone]] = new[first[gone]] - P + 1
                held = keys[~gone]
        return steps

    def evict(self, table: Table, weights: Tensor | None, now: Tensor) -> Tensor:
        token, valid = table.members()
        norm = table.column(NORM).masked_fill(~valid, float("-inf"))
        largest = norm == norm.amax(1, keepdim=True)
        oldest = token.where(largest & valid, NEVER).argmin(1, keepdim=True)
        over = valid.sum(1) > self.budget
        return remove_one(table, oldest, over)

    @classmethod
    def with_budget(cls, kept: int, context: int) -> KeyNormConfig:
        return cls(kept)
