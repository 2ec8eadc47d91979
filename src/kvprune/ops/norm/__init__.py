"""Root mean square normalisation: a plain version and a kernel.

Plain torch goes through the memory once for each of seven steps; the kernel, once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.dispatch import Operation
from kvprune.ops.norm import reference

STORED = [torch.float32, torch.bfloat16]
RMS_NORM = Operation(reference.rms_norm, cpu=STORED)


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: str | None = None) -> Tensor:
    """See reference.rms_norm."""
    return RMS_NORM.implementation(x, backend)(x, weight, eps)
