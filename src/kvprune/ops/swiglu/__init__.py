"""The gated activation of an MLP, silu(gate) · up: a plain version and a kernel.

Plain torch writes silu(gate) to memory and reads it again; the kernel does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.dispatch import Operation
from kvprune.ops.swiglu import reference

STORED = [torch.float32, torch.bfloat16]
SWIGLU = Operation(reference.swiglu, cpu=STORED)


def swiglu(gate: Tensor, up: Tensor, backend: str | None = None) -> Tensor:
    """See reference.swiglu."""
    return SWIGLU.implementation(gate, backend)(gate, up)
