"""Blocks, of which the last token stays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvprune.methods.pattern import Pattern
from kvprune.ops.never import NEVER
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StridedConfig(Pattern):
    """Baseline: each token sees its own block and the last token of each earlier block."""

    method: ClassVar[str] = "strided"
    trainable: ClassVar[bool] = True

    stride: Annotated[int, "length of a block"]

    def __post_init__(self) -> None:
        check_number(self, "stride", at_least=1, integer=True)

    def drop_position(self, position: Tensor) -> Tensor:
        next_block = (position // self.stride + 1) * self.stride
        return next_block.where(position + 1 < next_block, NEVER)

    @classmethod
    def with_budget(cls, kept: int, context: int) -> StridedConfig:
        # on average half of the current block, and one token of each earlier block
        held = {k: (k + 1) / 2 + context / k for k in range(1, context + 1)}
        return cls(min(held, key=lambda k: abs(held[k] - kept)))
