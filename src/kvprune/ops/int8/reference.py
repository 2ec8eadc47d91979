"""x ≈ scale · int8, with the scale that brings the largest number of a vector to 127."""

from __future__ import annotations

import torch
from torch import Tensor


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) → int8 (..., D), float16 (...).

    The scale is rounded first, so its rounding costs nothing: numbers are divided by what they will
    be multiplied by. A vector too small for a float16 scale becomes zero, one with NaN or Inf or
    numbers beyond 8 million NaN, as it would with any rounding that does not hide it.
    """
    x = x.float()
    scale = (x.abs().amax(-1) / 127).half()
    divisor = scale.float().where(scale > 0, torch.inf)[..., None]
    numbers = (x / divisor).nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8)
    return numbers, scale.where(scale.isfinite(), torch.nan)


def dequantise(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 (..., D), float16 (...) → (..., D)."""
    return (numbers.float() * scale.float()[..., None]).to(dtype)
