"""The keep product: soft as a running sum of logs, hard as one drop step per token."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.dispatch import Operation
from kvprune.ops.gate import Gate
from kvprune.ops.keep import reference
from kvprune.ops.keep.drop import drop_steps as drop_steps
from kvprune.ops.timeline import Timeline

LOG_KEEP = Operation(reference.log_keep, cpu=[torch.float32])
LOG_KEEP_BACKWARD = Operation(reference.log_keep_backward, cpu=[torch.float32])


def log_keep(
    scores: Tensor, carry: Tensor, time: Timeline, gate: Gate, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.log_keep."""
    return LOG_KEEP.implementation(scores, backend)(scores, carry, time, gate)


def log_keep_backward(
    grad: Tensor,
    scores: Tensor,
    carry_grad: Tensor,
    time: Timeline,
    gate: Gate,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """See reference.log_keep_backward."""
    implementation = LOG_KEEP_BACKWARD.implementation(scores, backend)
    return implementation(grad, scores, carry_grad, time, gate)
