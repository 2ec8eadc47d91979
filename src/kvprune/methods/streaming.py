"""StreamingLLM (Xiao et al., 2023): attention sinks and a sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvprune.methods.pattern import Pattern
from kvprune.ops.never import NEVER
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StreamingConfig(Pattern):
    """Training-free: the first tokens and a window of the last ones (StreamingLLM).

    Keys stay rotated to their true positions; the original renumbers them.
    """

    method: ClassVar[str] = "streaming"

    budget: Annotated[int, "how many tokens a layer may hold"]
    sinks: Annotated[int, "how many of them are the first of the row"] = 4

    def __post_init__(self) -> None:
        check_number(self, "sinks", at_least=0, integer=True)
        check_number(self, "budget", at_least=self.sinks + 1, integer=True)

    def drop_position(self, position: Tensor) -> Tensor:
        window = position + (self.budget - self.sinks)
        return window.where(position >= self.sinks, NEVER)

    @classmethod
    def with_budget(cls, kept: int, context: int) -> StreamingConfig:
        budget = max(kept, 2)
        return cls(budget, min(4, budget - 1))
