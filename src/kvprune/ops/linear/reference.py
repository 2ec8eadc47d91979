"""A linear layer in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b, summed in float32 at least. x: (M, I), weight: (O, I), bias: (O,) → (M, O)"""
    wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(x.dtype)
