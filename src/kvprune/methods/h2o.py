"""H2O (Zhang et al., 2023): heavy hitters and the most recent tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvprune.methods.scored import Scored
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    from torch import Tensor

    from kvprune.ops.decode.table import Table

# the attention that each token has received, summed over queries and heads
SCORE = "score"


@dataclass(frozen=True)
class H2OConfig(Scored):
    """Training-free: the last tokens, and those with the most attention so far (H2O)."""

    method: ClassVar[str] = "h2o"

    budget: Annotated[int, "how many tokens a layer may hold, half of them the last ones"]

    def __post_init__(self) -> None:
        check_number(self, "budget", at_least=2, integer=True)

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        return {SCORE: ()}

    def new_columns(self, key: Tensor) -> dict[str, Tensor]:
        B, _, T, _ = key.shape
        return {SCORE: key.new_zeros(B, T).float()}

    def scores(self, table: Table, weights: Tensor, now: Tensor) -> Tensor:
        """The attention of all queries so far; the last half of the budget is safe."""
        score = table.column(SCORE) + weights.sum(1)
        table.set_column(SCORE, score)
        recent = now[:, None] - table.members().token < self.budget - self.budget // 2
        return score.masked_fill(recent, float("inf"))

    @classmethod
    def with_budget(cls, kept: int, context: int) -> H2OConfig:
        return cls(max(kept, 2))
