"""The gate of the kernels against the plain version in float64: values and derivatives."""

import math

import pytest
import torch

from kvprune.ops.alpha_sigmoid import reference, triton
from kvprune.ops.gate import Gate

FUNCTIONS = ["alpha_sigmoid", "log_alpha_sigmoid"]


def points(alpha):
    """Around saturation, far beyond it, and where float32 ends."""
    limit = min(1 / (alpha - 1), 30.0) if alpha > 1 else 30.0
    even, size = torch.linspace(-1.2 * limit, 1.2 * limit, 500), torch.logspace(-30, 3, 100)
    ends = torch.tensor([0.0, limit, -limit, math.inf, -math.inf, math.nan])
    return torch.cat([even, size, -size, ends]).float()


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    "alpha", [1.0, 1 + 1e-9, 1.0001, 1.3, 1.5, 2, 3, 4.7, 8, 30, 200, 1e6, math.inf]
)
def test_matches_reference(function, alpha):
    x = points(alpha).requires_grad_()
    wide = x.detach().double().requires_grad_()
    got, want = getattr(triton, function)(x, alpha), getattr(reference, function)(wide, alpha)
    assert torch.equal(got.isnan(), want.isnan())
    # exact zeros and ones are exact
    assert torch.equal(got.isinf(), want.isinf())
    finite = want.isfinite()
    error = (got - want).abs() / want.abs().clamp(min=1)
    assert error[finite].max() <= 2e-7
    (grad,) = torch.autograd.grad(got[finite].sum(), x)
    (want_grad,) = torch.autograd.grad(want[finite].sum(), wide)
    # the slope of a steep gate at 0 is more than float32 holds
    finite &= (x != 0) | torch.tensor(alpha < 100)
    error = (grad - want_grad)[finite].abs().max()
    assert error <= 1e-6 * want_grad[finite].abs().max().clamp(min=1)
    saturated = x.detach().abs() > (1 / (alpha - 1) if alpha > 1 else math.inf)
    assert (grad[saturated] == 0).all()


def test_temperature():
    gate = Gate("temperature", 2.5)
    device_gate = triton.device_gate(gate, torch.device("cpu"))
    x = torch.linspace(-20, 20, 300)
    values, slopes = (
        triton._launch(x, torch.ones_like(x), device_gate, True, slopes) for slopes in (False, True)
    )
    torch.testing.assert_close(values, gate.log(x.double()).float(), atol=1e-7, rtol=2e-7)
    torch.testing.assert_close(slopes, gate.log_slope(x.double()).float(), atol=1e-7, rtol=4e-7)


def test_no_elements():
    assert triton.alpha_sigmoid(torch.empty(0, 3), 1.5).shape == (0, 3)
