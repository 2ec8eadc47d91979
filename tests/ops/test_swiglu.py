"""silu(gate) · up: the kernel against plain torch, and the e^x that it is made of."""

import numpy as np
import pytest
import torch

from helpers import random
from kvprune.ops.exp import exp
from kvprune.ops.jit import njit
from kvprune.ops.swiglu import STORED, SWIGLU, swiglu


def assert_nearly_equal(got, want):
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    eps = torch.finfo(want.dtype).eps
    if want.dtype is torch.bfloat16:
        # e^x within a unit of float32, which rarely is the difference between two bfloat16
        torch.testing.assert_close(got, want, rtol=2 * eps, atol=1e-37, equal_nan=True)
        assert ((got != want) & ~want.isnan()).sum() <= 1e-3 * want.numel()
    else:
        torch.testing.assert_close(got, want, rtol=8 * eps, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("backend", SWIGLU.available(exclude="reference"))
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(1,), (1, 1536), (3, 33), (2, 37, 577), (0, 4)])
def test_matches_reference(backend, dtype, shape):
    gate, up = random(*shape, dtype=dtype) * 5, random(*shape, seed=1, dtype=dtype)
    assert_nearly_equal(swiglu(gate, up, backend), swiglu(gate, up, "reference"))


@pytest.mark.parametrize("dtype", STORED)
def test_views_are_read_as_they_are(dtype):
    gate, up = random(6, 90, dtype=dtype), random(90, 6, seed=1, dtype=dtype).T
    want = swiglu(gate[::2, ::2], up[::2, ::2], "reference")
    assert_nearly_equal(swiglu(gate[::2, ::2], up[::2, ::2]), want)
    assert_nearly_equal(swiglu(gate, up), swiglu(gate, up, "reference"))


@pytest.mark.parametrize("dtype", STORED)
def test_large_gates_and_those_that_are_no_numbers(dtype):
    gate = torch.tensor([-1e30, -200, -100, -88, 0, 88, 1e30, torch.inf, torch.nan] * 3).to(dtype)
    up = random(27, dtype=dtype)
    assert_nearly_equal(swiglu(gate, up), swiglu(gate, up, "reference"))


def test_another_up_is_multiplied_by_torch():
    gate, up = random(3, 40, dtype=torch.bfloat16), random(3, 40, seed=1, dtype=torch.float32)
    assert torch.equal(swiglu(gate, up), swiglu(gate, up, "reference"))
    assert torch.equal(
        swiglu(gate, up[:1].bfloat16()), swiglu(gate, up[:1].bfloat16(), "reference")
    )


@njit(fastmath={"reassoc", "contract", "nsz", "arcp"})
def each_exp(x, out):
    for i in range(len(x)):
        out[i] = exp(x[i])


def test_exp_within_a_unit_in_the_last_place():
    x = np.concatenate([np.linspace(-87, 88.7, 400_001), np.linspace(-1, 1, 100_001)])
    x = x.astype(np.float32)
    got = np.empty_like(x)
    each_exp(x, got)
    want = np.exp(x.astype(np.float64))
    units = np.abs(got - want) / np.spacing(want.astype(np.float32))
    assert units.max() < 1.01


def test_exp_at_its_ends():
    x = np.float32([-np.inf, -1e30, -104, 0, 88.7, 89, np.inf, np.nan])
    got = np.empty_like(x)
    each_exp(x, got)
    want = [0, 0, 0, 1, np.exp(x[4].astype(np.float64)), np.inf, np.inf, np.nan]
    np.testing.assert_allclose(got, want, rtol=1e-6)
