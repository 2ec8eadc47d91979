"""TOVA (Oren et al., 2024): Token Omission Via Attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvprune.methods.scored import Scored
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    from torch import Tensor

    from kvprune.ops.decode.table import Table


@dataclass(frozen=True)
class TovaConfig(Scored):
    """Training-free: over the budget, the token with the least attention leaves (TOVA)."""

    method: ClassVar[str] = "tova"

    budget: Annotated[int, "how many tokens a layer may hold"]

    def __post_init__(self) -> None:
        check_number(self, "budget", at_least=1, integer=True)

    def scores(self, table: Table, weights: Tensor, now: Tensor) -> Tensor:
        """The attention of the last query alone."""
        return weights.mean(1)

    @classmethod
    def with_budget(cls, kept: int, context: int) -> TovaConfig:
        return cls(kept)
