"""The gate: σ_α of a score, its log, and the temperature sigmoid that the paper compares with."""

from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from kvprune.errors import PruneError

from .reference import log_temperature_sigmoid, temperature_sigmoid

__all__ = [
    "IMPLEMENTATIONS",
    "alpha_sigmoid",
    "available",
    "best_backend",
    "log_alpha_sigmoid",
    "log_temperature_sigmoid",
    "temperature_sigmoid",
]

# name → module, imported when it is first used: numba takes half a second
IMPLEMENTATIONS = {
    "reference": "kvprune.ops.alpha_sigmoid.reference",
    "cpu": "kvprune.ops.alpha_sigmoid.cpu",
}


def alpha_sigmoid(x: Tensor, alpha: float, backend: str | None = None) -> Tensor:
    """p = σ_α(x), which solves  p^(α−1) − (1−p)^(α−1) = (α−1)·x;  exactly 0 and 1 at the ends."""
    return _implementation(backend or best_backend(x)).alpha_sigmoid(x, alpha)


def log_alpha_sigmoid(x: Tensor, alpha: float, backend: str | None = None) -> Tensor:
    """log σ_α(x): −∞ where the gate is 0, and a gradient that is 0 there, not NaN."""
    return _implementation(backend or best_backend(x)).log_alpha_sigmoid(x, alpha)


def available(exclude: str | Collection[str] = ()) -> list[str]:
    """The names of the implementations that can run here."""
    left_out = {exclude} if isinstance(exclude, str) else set(exclude)
    if find_spec("numba") is None:
        left_out.add("cpu")
    return [name for name in IMPLEMENTATIONS if name not in left_out]


def best_backend(x: Tensor) -> str:
    """The fastest implementation for this tensor."""
    fits = x.device.type == "cpu" and x.dtype == torch.float32
    return "cpu" if fits and "cpu" in available() else "reference"


def _implementation(name: str) -> ModuleType:
    if name not in available():
        raise PruneError(
            f"the α-sigmoid has no backend {name!r} here; use one of {', '.join(available())}"
        )
    return import_module(IMPLEMENTATIONS[name])
