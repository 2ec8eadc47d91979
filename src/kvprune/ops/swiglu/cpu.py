"""The gated activation of an MLP on a CPU: both inputs are read once, and one output written."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kvprune.ops.decode.scalar import BITS, at, narrow, widen
from kvprune.ops.exp import exp
from kvprune.ops.jit import Array, njit
from kvprune.ops.swiglu import STORED, reference
from kvprune.ops.threads import use_threads

# how a kernel is told what lies at an address
KINDS = {dtype: np.empty(0, BITS[dtype]) for dtype in STORED}
# fewer numbers take less time than threads take to start
FEW = 32_768


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See reference.swiglu."""
    if up.dtype is not gate.dtype or up.shape != gate.shape:
        return reference.swiglu(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    numbers = gate.numel()
    # addresses, because three arrays would take longer to make than a row takes
    pointers = gate.data_ptr(), up.data_ptr(), out.data_ptr()
    if numbers <= FEW:
        _numbers(*pointers, numbers, 0, numbers, KINDS[gate.dtype])
    else:
        use_threads()
        _shares(*pointers, numbers, torch.get_num_threads(), KINDS[gate.dtype])
    return out


@njit(parallel=True, cache=True)
def _shares(gate: int, up: int, out: int, numbers: int, tasks: int, kind: Array) -> None:
    share = (numbers + tasks - 1) // tasks
    for task in prange(tasks):
        start, stop = task * share, min(numbers, (task + 1) * share)
        _numbers(gate, up, out, numbers, start, stop, kind)


@njit(cache=True, error_model="numpy")
def _numbers(
    gate: int, up: int, out: int, numbers: int, start: int, stop: int, kind: Array
) -> None:
    """The numbers from `start` to `stop`.

    A function of its own: inside of a parallel loop Numba takes writes to an address for dead.
    """
    # counted from 0: for an index that may be negative LLVM gathers numbers one by one
    gates = at(gate, (numbers,), kind)[start:stop]
    ups = at(up, (numbers,), kind)[start:stop]
    result = at(out, (numbers,), kind)[start:stop]
    for i in range(len(result)):
        g = widen(gates[i])
        silu = g / (np.float32(1) + exp(-g))
        result[i] = narrow(widen(narrow(silu, kind)) * widen(ups[i]), kind)
