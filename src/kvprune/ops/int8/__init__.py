"""Numbers as int8 with one float16 scale per vector: a plain version and its kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.dispatch import Operation
from kvprune.ops.int8 import reference
from kvprune.ops.int8.reference import dequantise

__all__ = ["QUANTISE", "dequantise", "quantise"]

QUANTISE = Operation(reference.quantise, cpu=[torch.float32, torch.bfloat16])


def quantise(x: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.quantise`; `backend` names an implementation, by default the best."""
    return QUANTISE.implementation(x, backend)(x)
