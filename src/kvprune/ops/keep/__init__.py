"""The keep product: soft as a running sum of logs, hard as one drop step a token."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.errors import PruneError
from kvprune.ops.gate import Gate
from kvprune.ops.keep import reference
from kvprune.ops.keep.drop import drop_steps as drop_steps

BACKENDS = ("reference", "cpu")


def available(exclude: str = "") -> list[str]:
    return [name for name in BACKENDS if name != exclude]


def best_backend(scores: Tensor) -> str:
    on_cpu = scores.device.type == "cpu" and scores.dtype == torch.float32
    return "cpu" if on_cpu else "reference"


def log_keep(
    scores: Tensor,
    carry: Tensor,
    clock: Tensor,
    visible: Tensor,
    votable: Tensor,
    gate: Gate,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """See reference.log_keep."""
    kernels = _backend(backend or best_backend(scores))
    return kernels.log_keep(scores, carry, clock, visible, votable, gate)


def log_keep_backward(
    grad: Tensor,
    scores: Tensor,
    carry_grad: Tensor,
    clock: Tensor,
    votable: Tensor,
    gate: Gate,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """See reference.log_keep_backward."""
    kernels = _backend(backend or best_backend(scores))
    return kernels.log_keep_backward(grad, scores, carry_grad, clock, votable, gate)


def _backend(name: str):  # type: ignore[no-untyped-def]
    if name == "reference":
        return reference
    if name == "cpu":
        # numba takes half a second to import: only where it is used
        from kvprune.ops.keep import cpu

        return cpu
    raise PruneError(f"no keep backend is called {name!r}; choose one of {', '.join(BACKENDS)}")
