"""A sliding window."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvprune.methods.pattern import Pattern
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LocalConfig(Pattern):
    """Baseline: each token sees the last `window` tokens, itself included."""

    method: ClassVar[str] = "local"
    trainable: ClassVar[bool] = True

    window: Annotated[int, "how many tokens a token sees, itself included"]

    def __post_init__(self) -> None:
        check_number(self, "window", at_least=1, integer=True)

    def drop_position(self, position: Tensor) -> Tensor:
        return position + self.window

    @classmethod
    def with_budget(cls, kept: int, context: int) -> LocalConfig:
        return cls(kept)
