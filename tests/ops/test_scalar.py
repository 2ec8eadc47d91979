"""Stored numbers as float32, by the processor's instruction and without it."""

import numba
import numpy as np
import pytest

from kvprune.ops.decode import scalar


@pytest.mark.parametrize("instruction", [scalar.HAS_FLOAT16, False])
def test_every_finite_float16(monkeypatch, instruction):
    monkeypatch.setattr(scalar, "HAS_FLOAT16", instruction)
    widen = scalar.widen

    @numba.njit
    def widen_all(bits, out):
        for i in range(len(bits)):
            out[i] = widen(bits[i])

    numbers = np.arange(2**16, dtype=np.uint16).view(np.float16)
    numbers = numbers[np.isfinite(numbers)]
    got = np.empty(len(numbers), np.float32)
    widen_all(numbers.view(np.int16), got)
    np.testing.assert_array_equal(got.view(np.int32), numbers.astype(np.float32).view(np.int32))
