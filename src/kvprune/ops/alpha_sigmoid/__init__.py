"""The gate: σ_α of a score, its log, and the temperature sigmoid that the paper compares with."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.dispatch import Operation

from . import reference
from .reference import log_temperature_sigmoid, temperature_sigmoid

__all__ = [
    "ALPHA_SIGMOID",
    "LOG_ALPHA_SIGMOID",
    "alpha_sigmoid",
    "log_alpha_sigmoid",
    "log_temperature_sigmoid",
    "temperature_sigmoid",
]

ALPHA_SIGMOID = Operation(reference.alpha_sigmoid, cpu=[torch.float32], triton=[torch.float32])
LOG_ALPHA_SIGMOID = Operation(
    reference.log_alpha_sigmoid, cpu=[torch.float32], triton=[torch.float32]
)


def alpha_sigmoid(x: Tensor, alpha: float, backend: str | None = None) -> Tensor:
    """p = σ_α(x), which solves  p^(α−1) − (1−p)^(α−1) = (α−1)·x;  exactly 0 and 1 at the ends."""
    return ALPHA_SIGMOID.implementation(x, backend)(x, alpha)


def log_alpha_sigmoid(x: Tensor, alpha: float, backend: str | None = None) -> Tensor:
    """log σ_α(x): −∞ where the gate is 0, and a gradient that is 0 there, not NaN."""
    return LOG_ALPHA_SIGMOID.implementation(x, backend)(x, alpha)
