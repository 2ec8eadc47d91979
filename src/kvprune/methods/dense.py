"""No pruning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvprune.methods.base import Method


@dataclass(frozen=True)
class DenseConfig(Method):
    """No pruning: every token sees all earlier ones."""

    method: ClassVar[str] = "dense"
    trainable: ClassVar[bool] = True
    prunes: ClassVar[bool] = False
