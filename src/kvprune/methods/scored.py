"""Over a budget, the token with the lowest score leaves: what TOVA and H2O share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvprune.methods.base import Method, remove_one

if TYPE_CHECKING:
    from torch import Tensor

    from kvprune.ops.decode.table import Table


@dataclass(frozen=True)
class Scored(Method):
    """A method that judges by attention weights: one token comes in, at most one leaves."""

    watches: ClassVar[bool] = True
    evicts: ClassVar[bool] = True
    reversible: ClassVar[bool] = False

    if TYPE_CHECKING:

        @property
        def budget(self) -> int: ...

    @abstractmethod
    def scores(self, table: Table, weights: Tensor, now: Tensor) -> Tensor:
        """How much each slot is worth after the step: (B, S), inf if it must stay."""

    def evict(self, table: Table, weights: Tensor | None, now: Tensor) -> Tensor:
        assert weights is not None
        valid = table.members().valid
        score = self.scores(table, weights, now)
        over = valid.sum(1) > self.budget
        least = score.masked_fill(~valid, float("inf")).argmin(1, keepdim=True)
        return remove_one(table, least, over)
