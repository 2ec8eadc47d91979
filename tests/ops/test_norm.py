"""Root mean square normalisation: the kernel against plain torch."""

import pytest
import torch

from helpers import random
from kvprune.ops.norm import RMS_NORM, STORED, rms_norm

# the sum of squares in another order moves the scale by a few units of float32; rarely that moves
# a bfloat16 to its neighbour, before the weight or after it
RARELY = 1e-3


def assert_nearly_equal(got, want):
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    eps = torch.finfo(want.dtype).eps
    if want.dtype is torch.bfloat16:
        torch.testing.assert_close(got, want, rtol=2 * eps, atol=0)
        assert (got != want).sum() <= RARELY * want.numel()
    else:
        torch.testing.assert_close(got, want, rtol=8 * eps, atol=0)


@pytest.mark.parametrize("backend", RMS_NORM.available(exclude="reference"))
@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("shape", [(1, 1), (1, 576), (3, 33), (2, 5, 64), (2, 37, 577), (0, 4)])
def test_matches_reference(backend, dtype, shape):
    x, weight = random(*shape, dtype=dtype) * 3, random(shape[-1], seed=1, dtype=dtype)
    want = rms_norm(x, weight, 1e-5, "reference")
    assert_nearly_equal(rms_norm(x, weight, 1e-5, backend), want)


@pytest.mark.parametrize("dtype", STORED)
def test_views_are_read_as_they_are(dtype):
    x, weight = random(6, 90, dtype=dtype), random(90, seed=1, dtype=dtype)
    want = rms_norm(x[::2, ::2], weight[::2], 1e-5, "reference")
    assert_nearly_equal(rms_norm(x[::2, ::2], weight[::2], 1e-5), want)
    assert_nearly_equal(
        rms_norm(x.T, weight[:6], 1e-5), rms_norm(x.T, weight[:6], 1e-5, "reference")
    )


@pytest.mark.parametrize("dtype", STORED)
def test_epsilon_keeps_small_rows_small(dtype):
    x, weight = random(4, 64, dtype=dtype) * 1e-4, torch.ones(64, dtype=dtype)
    got = rms_norm(x, weight, 1e-2)
    assert_nearly_equal(got, rms_norm(x, weight, 1e-2, "reference"))
    assert got.abs().max() < 0.01
    assert rms_norm(torch.zeros_like(x), weight, 1e-2).count_nonzero() == 0


@pytest.mark.parametrize("dtype", STORED)
def test_nan_stays_in_its_row(dtype):
    x = random(3, 40, dtype=dtype)
    x[1, 7] = torch.nan
    got = rms_norm(x, torch.ones(40, dtype=dtype), 1e-5)
    assert got[1].isnan().all()
    assert not got[[0, 2]].isnan().any()


def test_another_weight_is_multiplied_by_torch():
    x, weight = random(3, 40, dtype=torch.bfloat16), random(40, dtype=torch.float32)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5, "reference"))
    assert torch.equal(rms_norm(x, weight[:1], 1e-5), rms_norm(x, weight[:1], 1e-5, "reference"))
