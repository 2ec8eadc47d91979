"""The keep product on CPUs: gate, running sum and mask in one pass over a block of scores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvprune.ops.alpha_sigmoid.table import gate_table, log_gate, log_gate_slope
from kvprune.ops.gate import Gate
from kvprune.ops.threads import use_threads

# keys a thread takes at a time: a stripe's carry and a row of its scores stay in the first cache
STRIPE = 256


def log_keep(
    scores: Tensor, carry: Tensor, clock: Tensor, visible: Tensor, votable: Tensor, gate: Gate
) -> tuple[Tensor, Tensor]:
    """See reference.log_keep."""
    out, after = torch.empty_like(scores), carry.clone(memory_format=torch.contiguous_format)
    _run(_forward, gate, scores, clock, visible, votable, out, after)
    return out, after


def log_keep_backward(
    grad: Tensor, scores: Tensor, carry_grad: Tensor, clock: Tensor, votable: Tensor, gate: Gate
) -> tuple[Tensor, Tensor]:
    """See reference.log_keep_backward."""
    out = torch.empty_like(scores)
    before = carry_grad.clone(memory_format=torch.contiguous_format)
    _run(_backward, gate, grad, scores, clock, votable, out, before)
    return out, before


def _run(kernel: Callable, gate: Gate, *tensors: Tensor) -> None:
    use_threads()
    arrays = (tensor.detach().contiguous().numpy() for tensor in tensors)
    kernel(gate_table(gate.kind, gate.alpha), *arrays)


@njit(parallel=True, cache=True, fastmath={"contract"})
def _forward(table, scores, clock, visible, votable, out, carry):
    B, Q, S = scores.shape
    stripes = (S + STRIPE - 1) // STRIPE
    for task in prange(B * stripes):
        b = task // stripes
        start = (task % stripes) * STRIPE
        stop = min(start + STRIPE, S)
        for k in range(Q):
            now = clock[b, k]
            for j in range(start, stop):
                if now >= votable[b, j]:
                    carry[b, j] += log_gate(scores[b, k, j], table)
                seen = carry[b, j] if now >= visible[b, j] else np.float32(-np.inf)
                out[b, k, j] = seen if now >= 0 else np.float32(0)


@njit(parallel=True, cache=True, fastmath={"contract"})
def _backward(table, grad, scores, clock, votable, out, carry):
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
                vote = now >= votable[b, j]
                slope = log_gate_slope(scores[b, k, j], table) if vote else np.float32(0)
                out[b, k, j] = carry[b, j] * slope
