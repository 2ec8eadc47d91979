"""Root mean square normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w · x / √(mean(x²) + ε). x: (..., D), weight: (D,) → (..., D)

    As Llama computes it: in float32, rounded to the dtype of x before it is multiplied by w, and
    once more after that.
    """
    wide = x.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)
