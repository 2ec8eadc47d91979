"""The α-sigmoid of float32 tensors on the CPU: one table look-up per element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numba import prange
from torch import Tensor

from kvprune.ops.jit import Array, njit
from kvprune.ops.threads import use_threads

from .table import GateTable, gate, gate_slope, gate_table, log_gate, log_gate_slope

Kernel = Callable[..., None]


def alpha_sigmoid(x: Tensor, alpha: float) -> Tensor:
    """reference.alpha_sigmoid, the value to 1e-7 and the slope to 1e-6 of its largest."""
    return _look_up(x, alpha, _gates, _gate_grads)


def log_alpha_sigmoid(x: Tensor, alpha: float) -> Tensor:
    """reference.log_alpha_sigmoid, to 1e-7 of itself or of 1, whichever is more."""
    return _look_up(x, alpha, _log_gates, _log_gate_grads)


class _TableLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float, values: Kernel, grads: Kernel) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.table, ctx.grads = gate_table("alpha", alpha), grads
        out = torch.empty_like(x)
        _run(values, ctx.table, x, out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        _run(ctx.grads, ctx.table, x, grad.contiguous(), out)
        return out, None, None, None


_look_up: Callable[[Tensor, float, Kernel, Kernel], Tensor] = _TableLookup.apply


def _run(kernel: Kernel, table: GateTable, *tensors: Tensor) -> None:
    use_threads()
    kernel(table, *(tensor.detach().view(-1).numpy() for tensor in tensors))


@njit(parallel=True, cache=True)
def _gates(table: GateTable, x: Array, out: Array) -> None:
    for i in prange(x.size):
        out[i] = gate(x[i], table)


@njit(parallel=True, cache=True)
def _gate_grads(table: GateTable, x: Array, grad: Array, out: Array) -> None:
    for i in prange(x.size):
        out[i] = grad[i] * gate_slope(x[i], table)


@njit(parallel=True, cache=True)
def _log_gates(table: GateTable, x: Array, out: Array) -> None:
    for i in prange(x.size):
        out[i] = log_gate(x[i], table)


@njit(parallel=True, cache=True)
def _log_gate_grads(table: GateTable, x: Array, grad: Array, out: Array) -> None:
    for i in prange(x.size):
        out[i] = grad[i] * log_gate_slope(x[i], table)
