"""The gated activation of an MLP in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, with silu(g) = g / (1 + e^−g); silu is rounded before the product."""
    return F.silu(gate) * up
