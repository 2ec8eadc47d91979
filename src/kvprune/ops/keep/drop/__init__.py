"""Hard pruning is one integer per token: the step at which it was dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.attend.blocks import WIDEST
from kvprune.ops.dispatch import REFERENCE, Operation
from kvprune.ops.keep.drop import reference
from kvprune.ops.timeline import NEVER, Timeline

DROP_STEPS = Operation(reference.drop_steps, cpu=[torch.float32], triton=[torch.float32])


def drop_steps(
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor,
    timeline: Timeline,
    threshold: float = 0.0,
    block: int = 256,
    backend: str | None = None,
) -> Tensor:
    """See reference.drop_steps; votes wider than Triton's tiles are the reference's on a GPU."""
    if backend is None and q_int.is_cuda and q_int.shape[-1] > WIDEST:
        backend = REFERENCE
    implementation = DROP_STEPS.implementation(q_int, backend)
    return implementation(q_int, k_int, beta, timeline, threshold, block)


def kept_pairs(drop_step: Tensor, timeline: Timeline) -> Tensor:
    """How many pairs j < k of a real query and an earlier real token that it still sees: (B,)."""
    T = timeline.clock.shape[-1]
    real = timeline.clock >= 0
    before = torch.nn.functional.pad(real.cumsum(-1), (1, 0))  # real queries before index i
    last = before.gather(-1, drop_step.clamp(0, T))
    first = before.gather(-1, (timeline.index + 1).clamp(min=0).expand_as(drop_step))
    return (last - first).where(timeline.visible_from != NEVER, 0).sum(-1)
