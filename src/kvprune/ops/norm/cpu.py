"""Root mean square normalisation on a CPU: each row is read from memory once."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kvprune.ops.decode.scalar import BITS, at, narrow, widen
from kvprune.ops.jit import FASTMATH, Array, Scalar, njit
from kvprune.ops.norm import STORED, reference
from kvprune.ops.threads import use_threads

# how a kernel is told what lies at an address
KINDS = {dtype: np.empty(0, BITS[dtype]) for dtype in STORED}
# fewer numbers take less time than threads take to start
FEW = 32_768


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See reference.rms_norm; the sum of squares is taken in another order."""
    width = x.shape[-1]
    if weight.dtype is not x.dtype or weight.shape != (width,):
        return reference.rms_norm(x, weight, eps)
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    numbers = x.numel()
    rows = numbers // width if width else 0
    # addresses, because three arrays would take longer to make than a row takes
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    if numbers <= FEW:
        _rows(*pointers, rows, width, eps, 0, rows, KINDS[x.dtype])
    else:
        use_threads()
        _shares(*pointers, rows, width, eps, torch.get_num_threads(), KINDS[x.dtype])
    return out


@njit(parallel=True, cache=True)
def _shares(
    x: int, weight: int, out: int, rows: int, width: int, eps: float, tasks: int, kind: Array
) -> None:
    share = (rows + tasks - 1) // tasks
    for task in prange(tasks):
        start, stop = task * share, min(rows, (task + 1) * share)
        _rows(x, weight, out, rows, width, eps, start, stop, kind)


@njit(cache=True, error_model="numpy")
def _rows(
    x: int,
    weight: int,
    out: int,
    rows: int,
    width: int,
    eps: float,
    start: int,
    stop: int,
    kind: Array,
) -> None:
    """The rows from `start` to `stop`.

    A function of its own: inside of a parallel loop Numba takes writes to an address for dead.
    """
    given, result = at(x, (rows, width), kind), at(out, (rows, width), kind)
    weights = at(weight, (width,), kind)
    for m in range(start, stop):
        mean = _square_sum(given[m]) / np.float32(width)
        scale = np.float32(1) / np.sqrt(mean + np.float32(eps))
        for i in range(width):
            normal = widen(narrow(widen(given[m, i]) * scale, kind))
            result[m, i] = narrow(widen(weights[i]) * normal, kind)


@njit(cache=True, fastmath=FASTMATH)
def _square_sum(row: Array) -> Scalar:
    total = np.float32(0)
    for i in range(len(row)):
        number = widen(row[i])
        total += number * number
    return total
