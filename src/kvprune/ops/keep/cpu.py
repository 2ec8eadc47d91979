"""The keep product on CPUs: gate, running sum and mask in one pass over a block of scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kvprune.ops.alpha_sigmoid.table import GateTable, gate_table, log_gate, log_gate_slope
from kvprune.ops.gate import Gate
from kvprune.ops.jit import Array, njit
from kvprune.ops.threads import use_threads
from kvprune.ops.timeline import Timeline

# keys per task: a stripe's carry and a row of its scores fit in the first-level cache
STRIPE = 256


def log_keep(scores: Tensor, carry: Tensor, time: Timeline, gate: Gate) -> tuple[Tensor, Tensor]:
    """See reference.log_keep."""
    out, after = torch.empty_like(scores), carry.clone(memory_format=torch.contiguous_format)
    _run(_forward, gate, scores, time.clock, time.visible_from, time.votable_from, out, after)
    return out, after


def log_keep_backward(
    grad: Tensor, scores: Tensor, carry_grad: Tensor, time: Timeline, gate: Gate
) -> tuple[Tensor, Tensor]:
    """See reference.log_keep_backward."""
    out = torch.empty_like(scores)
    before = carry_grad.clone(memory_format=torch.contiguous_format)
    _run(_backward, gate, grad, scores, time.clock, time.votable_from, out, before)
    return out, before


def _run(kernel: Callable[..., None], gate: Gate, *tensors: Tensor) -> None:
    use_threads()
    arrays = (tensor.detach().contiguous().numpy() for tensor in tensors)
    kernel(gate_table(gate.kind, gate.alpha), *arrays)


@njit(parallel=True, cache=True, fastmath={"contract"})
def _forward(
    table: GateTable,
    scores: Array,
    clock: Array,
    visible_from: Array,
    votable_from: Array,
    out: Array,
    carry: Array,
) -> None:
    B, Q, S = scores.shape
    stripes = (S + STRIPE - 1) // STRIPE
    for task in prange(B * stripes):
        b = task // stripes
        start = (task % stripes) * STRIPE
        stop = min(start + STRIPE, S)
        for k in range(Q):
            now = clock[b, k]
            for j in range(start, stop):
                if now >= votable_from[b, j]:
                    carry[b, j] += log_gate(scores[b, k, j], table)
                seen = carry[b, j] if now >= visible_from[b, j] else np.float32(-np.inf)
                out[b, k, j] = seen if now >= 0 else np.float32(0)


@njit(parallel=True, cache=True, fastmath={"contract"})
def _backward(
    table: GateTable,
    grad: Array,
    scores: Array,
    clock: Array,
    votable_from: Array,
    out: Array,
    carry: Array,
) -> None:
    B, Q, S = scores.shape
    stripes = (S + STRIPE - 1) // STRIPE
    for task in prange(B * stripes):
        b = task // stripes
        start = (task % stripes) * STRIPE
        stop = min(start + STRIPE, S)
        for k in range(Q - 1, -1, -1):
            now = clock[b, k]
            for j in range(start, stop):
                carry[b, j] += grad[b, k, j]
                vote = now >= votable_from[b, j]
                slope = log_gate_slope(scores[b, k, j], table) if vote else np.float32(0)
                out[b, k, j] = carry[b, j] * slope
