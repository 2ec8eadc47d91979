"""A linear layer with few rows: its weights are read once, at the speed of the memory."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kvprune.ops.decode.scalar import BITS, at, widen
from kvprune.ops.jit import FASTMATH, Array, njit
from kvprune.ops.threads import use_threads

# how a kernel is told what lies at an address
KINDS = {dtype: np.empty(0, bits) for dtype, bits in BITS.items()}
FLOAT32 = KINDS[torch.float32]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """See reference.linear."""
    dtype, rows, (outputs, inputs) = x.dtype, x.shape[0], weight.shape
    if dtype is not torch.float32:
        x = x.float()
    if not x.is_contiguous():
        x = x.contiguous()
    if not weight.is_contiguous():
        weight = weight.contiguous()
    out = torch.empty(rows, outputs)
    use_threads()
    # addresses, because three arrays would take longer to make than a small layer to multiply
    _product(
        weight.data_ptr(), x.data_ptr(), out.data_ptr(), rows, outputs, inputs,
        torch.get_num_threads(), KINDS[weight.dtype], FLOAT32,
    )  # fmt: skip
    if bias is not None:
        out += bias
    return out if dtype is torch.float32 else out.to(dtype)


@njit(parallel=True, cache=True, fastmath=FASTMATH)
def _product(
    weight: int,
    x: int,
    out: int,
    rows: int,
    outputs: int,
    inputs: int,
    tasks: int,
    kind: Array,
    float32: Array,
) -> None:
    share = (outputs + tasks - 1) // tasks
    for task in prange(tasks):
        start, stop = task * share, min(outputs, (task + 1) * share)
        _outputs(weight, x, out, rows, outputs, inputs, start, stop, kind, float32)


@njit(cache=True, fastmath=FASTMATH)
def _outputs(
    weight: int,
    x: int,
    out: int,
    rows: int,
    outputs: int,
    inputs: int,
    start: int,
    stop: int,
    kind: Array,
    float32: Array,
) -> None:
    """The numbers from `start` to `stop` of every row.

    A function of its own: inside of a parallel loop Numba takes writes to an address for dead.
    """
    weights = at(weight, (outputs, inputs), kind)
    given, result = at(x, (rows, inputs), float32), at(out, (rows, outputs), float32)
    for o in range(start, stop):
        # the weights of one output stay in the first-level cache while rows take turns
        for m in range(rows):
            total = np.float32(0)
            for i in range(inputs):
                total += widen(weights[o, i]) * given[m, i]
            result[m, o] = total
