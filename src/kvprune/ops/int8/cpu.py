"""`reference.quantise` as one pass of a Numba kernel, bit for bit the same."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kvprune.ops.decode.scalar import BITS, widen
from kvprune.ops.jit import Array, njit
from kvprune.ops.threads import use_threads

# vectors that one thread finishes before a second has woken up
ONE_THREAD = 1024


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    if not x.is_contiguous():
        x = x.contiguous()
    numbers = torch.empty(x.shape, dtype=torch.int8)
    largest = torch.empty(x.shape[:-1])
    bits: Array = x.detach().view(torch.uint8).numpy().view(BITS[x.dtype])
    rows = bits.reshape(-1, x.shape[-1])
    use_threads(1 if len(rows) <= ONE_THREAD else None)
    largest_of(rows, largest.view(-1).numpy())
    # NumPy and Numba have no float16 that every processor runs
    scale = (largest / 127).half()
    divide(rows, scale.float().view(-1).numpy(), numbers.view(-1, x.shape[-1]).numpy())
    return numbers, scale.where(scale.isfinite(), torch.nan)


@njit(parallel=True, cache=True)
def largest_of(x: Array, largest: Array) -> None:
    for row in prange(len(x)):
        most = np.float32(0)
        for d in range(x.shape[1]):
            number = abs(widen(x[row, d]))
            # no number is larger than NaN: once found, it stays
            if number > most or number != number:
                most = number
        largest[row] = most


@njit(parallel=True, cache=True)
def divide(x: Array, scale: Array, numbers: Array) -> None:
    for row in prange(len(x)):
        usable = 0 < scale[row] < np.inf
        for d in range(x.shape[1]):
            q = widen(x[row, d]) / scale[row] if usable else np.float32(0)
            numbers[row, d] = np.int8(max(min(np.rint(q), np.float32(127)), np.float32(-127)))
