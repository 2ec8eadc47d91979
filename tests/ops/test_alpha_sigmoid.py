"""The gate against a bisection too slow to be wrong, and every kernel against the reference."""

import functools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kvprune.errors import PruneError
from kvprune.ops.alpha_sigmoid import (
    ALPHA_SIGMOID,
    alpha_sigmoid,
    log_alpha_sigmoid,
    log_temperature_sigmoid,
    temperature_sigmoid,
)

BACKENDS = ALPHA_SIGMOID.available()
FUNCTIONS = [alpha_sigmoid, log_alpha_sigmoid]
ALPHAS = [1.0, 1 + 1e-7, 1.001, 1.01, 1.1, 1.5, 2.0, 2.3, 3.0, 4.0, 8.0, 20.0, 64.0]


@pytest.fixture(autouse=True)
def one_thread():
    # torch shares out exp and log from 2048 elements on; on a busy machine the threads then wait
    # for each other many times longer than they compute
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bisect_log_gate(x, alpha):
    """log σ_α(x) in float64: halve an interval of log p until nothing is left of it."""
    a, y = alpha - 1, -x.abs()
    low, high = torch.full_like(x, -2000.0), torch.full_like(x, math.log(0.5))
    for _ in range(80):
        log_p = (low + high) / 2
        log_q = torch.log1p(-log_p.exp())
        if a == 0:
            value = log_p - log_q
        elif a < 1:
            value = (torch.expm1(a * log_p) - torch.expm1(a * log_q)) / a
        else:
            value = (torch.exp(a * log_p) - torch.exp(a * log_q)) / a
        low, high = torch.where(value < y, log_p, low), torch.where(value < y, high, log_p)
    if a > 0:
        low = low.masked_fill(a * x.abs() >= 1, -math.inf)
    return torch.where(x > 0, torch.log1p(-low.exp()), low)


def scores(alpha, count=1000):
    """float32 scores everywhere, near 0 and near both ends of the unsaturated range."""
    random = torch.Generator().manual_seed(0)
    end = min(1 / (alpha - 1), 60.0) if alpha > 1 else 60.0

    def uniform(low, high):
        return torch.empty(count, dtype=torch.float64).uniform_(low, high, generator=random)

    sign = uniform(-1, 1).sign()
    x = [uniform(-1.1, 1.1), sign * 2 ** uniform(-90, 0), sign * (1 - 2 ** uniform(-25, -1))]
    return (torch.cat(x) * end).float()


@functools.cache
def solved(alpha):
    """Scores, and log σ_α of them and of their negatives, in float64."""
    x = scores(alpha)
    return x, bisect_log_gate(x.double(), alpha), bisect_log_gate(-x.double(), alpha)


def consecutive(start, count=4000):
    """float32 numbers, in growing order, with none left out."""
    bits = np.float32(abs(start)).view(np.int32) + np.arange(-count // 2, count // 2)
    x = torch.from_numpy(bits.clip(0).astype(np.int32).view(np.float32))
    return x if start > 0 else -x.flip(0)


def value_and_grad(function, x, alpha, backend):
    x = x.detach().clone().requires_grad_()
    value = function(x, alpha, backend)
    (grad,) = torch.autograd.grad(value.sum(), x)
    return value.detach(), grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_value_solves_the_equation(backend, alpha):
    x, want, _ = solved(alpha)
    assert_close(alpha_sigmoid(x, alpha, backend).double(), want.exp(), atol=1e-7, rtol=0)
    assert_close(log_alpha_sigmoid(x, alpha, backend).double(), want, atol=1e-7, rtol=2e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", ALPHAS)
def test_gradient_is_the_implicit_derivative(backend, alpha):
    x, log_p, log_q = solved(alpha)
    want = 1 / (torch.exp((alpha - 2) * log_p) + torch.exp((alpha - 2) * log_q))
    want = want.masked_fill(log_p.isinf() | log_q.isinf(), 0)
    _, grad = value_and_grad(alpha_sigmoid, x, alpha, backend)
    assert_close(grad.double(), want, atol=5e-7 * want.max().item(), rtol=5e-7)

    _, grad = value_and_grad(log_alpha_sigmoid, x, alpha, backend)
    want_log = (want / log_p.exp()).masked_fill(want == 0, 0)
    # below ½ the slope is right to its own last digits, however small or large
    low = (x <= 0) & (log_p > -300)
    assert_close(grad.double()[low], want_log[low], atol=0, rtol=1e-6)
    assert_close(grad.double()[x > 0], want_log[x > 0], atol=1e-6 * want.max().item(), rtol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 2.0, 4.5, 12.0])
def test_gradcheck(function, alpha):
    end = 1 / (alpha - 1) if alpha > 1 else 5.0
    x = (torch.linspace(-0.9, 0.9, 11, dtype=torch.float64) * end).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, alpha), x, eps=1e-7 * end)


@pytest.mark.parametrize("backend", BACKENDS)
def test_closed_forms(backend):
    x = torch.linspace(-3, 3, 1001)
    assert_close(alpha_sigmoid(x, 1, backend), x.sigmoid(), atol=1e-7, rtol=0)
    assert_close(alpha_sigmoid(x, 2, backend), ((1 + x) / 2).clamp(0, 1), atol=1e-7, rtol=0)
    assert_close(alpha_sigmoid(x, 3, backend), (0.5 + x).clamp(0, 1), atol=1e-7, rtol=0)
    step, grad = value_and_grad(alpha_sigmoid, x, math.inf, backend)
    assert_close(step, (x > 0).float(), atol=0, rtol=0)
    assert_close(log_alpha_sigmoid(x, math.inf, backend), step.log(), atol=0, rtol=0)
    assert not grad.any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, 5.0, 9.0, 65.0, 1e4])
def test_saturation_is_exact(backend, alpha):
    end = 1 / (alpha - 1)
    beyond = torch.tensor([1 + 1e-6, 1.5, 100.0, math.inf]) * end
    for sign, gate in [(1, 1.0), (-1, 0.0)]:
        value, grad = value_and_grad(alpha_sigmoid, sign * beyond, alpha, backend)
        log_value, log_grad = value_and_grad(log_alpha_sigmoid, sign * beyond, alpha, backend)
        assert (value == gate).all()
        assert (log_value == torch.tensor(gate).log()).all()
        assert not grad.any()
        assert not log_grad.any()
    inside = torch.tensor([-(1 - 1e-6) * end])
    assert 0 < alpha_sigmoid(inside, alpha, backend) < 1e-5
    assert log_alpha_sigmoid(inside, alpha, backend).isfinite()


@pytest.mark.parametrize("alpha", [1.5, 6.0, 50.0])
def test_float64_saturates_at_the_quotient(alpha):
    # in float64, 49 · (1/49) < 1
    end = torch.tensor([1 / (alpha - 1)], dtype=torch.float64)
    assert alpha_sigmoid(-end, alpha) == 0
    assert alpha_sigmoid(end, alpha) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("alpha", [1.0, 1.003, 1.5, 2.0, 4.0, 8.0, 64.0, 1e4])
def test_never_falls(backend, function, alpha):
    end = min(1 / (alpha - 1), 50.0) if alpha > 1 else 50.0
    # around ½ and the powers of two, cells of the table meet
    places = [1, 0.999, 0.75, 0.5, 0.4, 0.25, 0.125, 2**-7, 2**-20, 2**-64]
    x = torch.stack([consecutive(sign * end * place) for place in places for sign in (-1, 1)])
    gate = function(x, alpha, backend)
    assert (x[:, 1:] > x[:, :-1]).all()
    assert (gate[:, 1:] >= gate[:, :-1]).all()


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=50)
@given(x=st.floats(-50, 50, width=32), alpha=st.floats(1, 64))
def test_symmetry(backend, x, alpha):
    x = torch.tensor([x, -x])
    gate = alpha_sigmoid(x, alpha, backend)
    assert_close(gate[0], 1 - gate[1], atol=1.2e-7, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("centre", [1.0, 2.0, 3.0])
def test_continuous_in_alpha(backend, centre):
    x = torch.linspace(-1.5, 1.5, 301)
    middle = alpha_sigmoid(x, centre, backend)
    for step in [1e-15, 1e-12, 1e-9, 1e-7, 1e-5, 1e-3]:
        assert_close(alpha_sigmoid(x, centre + step, backend), middle, atol=step + 1e-7, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_gate_of_gates_that_float32_cannot_hold(backend):
    # at a = 0.01 and x = −90, p = (1 − 0.9)^100 = 1e-100 but for a correction of p itself
    x = torch.tensor([-90.0, -50.0])
    value, grad = value_and_grad(log_alpha_sigmoid, x, 1.01, backend)
    assert_close(value, torch.tensor([math.log(0.1), math.log(0.5)]) * 100, rtol=2e-7, atol=0)
    assert_close(grad, torch.tensor([10.0, 2.0]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", ALPHA_SIGMOID.available(exclude="reference"))
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 0, 2), (2, 63), (3, 5, 131)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided"])
def test_matches_reference(backend, function, shape, layout):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if layout == "transposed":
        x = x.permute(tuple(reversed(range(x.ndim))))
    if layout == "strided":
        x = torch.stack([x, x + 1], dim=-1)[..., 1]
    weight = torch.randn_like(x)
    results = []
    for name in ("reference", backend):
        leaf = x.detach().requires_grad_()
        value = function(leaf, 1.7, name)
        kept = value.detach().clamp(min=-100)
        results.append((kept, *torch.autograd.grad(value, leaf, weight)))
    assert results[0][0].shape == x.shape
    assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_threads_change_nothing(function):
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(2))
    alone = value_and_grad(function, x, 1.4, "cpu")
    torch.set_num_threads(2)
    assert_close(value_and_grad(function, x, 1.4, "cpu"), alone, rtol=0, atol=0)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_comes_back(function, dtype):
    x = torch.linspace(-0.9, 2.5, 33, dtype=dtype)
    value, grad = value_and_grad(function, x, 1.6, None)
    want, want_grad = value_and_grad(function, x.double(), 1.6, "reference")
    assert value.dtype == grad.dtype == dtype
    # rounded once, at the end
    assert_close(value, want.to(dtype), rtol=1e-7, atol=1e-7)
    assert_close(grad, want_grad.to(dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 64.0, 1e4, math.inf])
def test_nan_stays_and_spreads_nowhere(backend, function, alpha):
    x = torch.tensor([math.nan, 0.0, -1e-45, 1e-45, 3e38, -3e38, -math.inf, math.inf, -math.nan])
    value, grad = value_and_grad(function, x, alpha, backend)
    assert value.isnan().tolist() == x.isnan().tolist()
    assert grad.isnan().tolist() == x.isnan().tolist()
    assert not grad.isinf().any()


def test_backend_is_chosen_by_tensor():
    assert ALPHA_SIGMOID.best_backend(torch.zeros(2)) == "cpu"
    assert ALPHA_SIGMOID.best_backend(torch.zeros(2, dtype=torch.bfloat16)) == "reference"
    assert ALPHA_SIGMOID.best_backend(torch.zeros(2, device="meta")) == "reference"
    assert ALPHA_SIGMOID.available(exclude=("cpu",)) == ["reference"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("alpha", [0.5, 0.0, -1.0, math.nan, -math.inf])
def test_bad_alpha(backend, function, alpha):
    with pytest.raises(PruneError, match=f"alpha is {alpha}.*use 1"):
        function(torch.zeros(3), alpha, backend)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_bad_backend(function):
    with pytest.raises(PruneError, match=r"'abacus'.*reference, cpu"):
        function(torch.zeros(3), 1.5, "abacus")
    with pytest.raises(PruneError, match=r"float64.*reference"):
        function(torch.zeros(3, dtype=torch.float64), 1.5, "cpu")


def test_temperature_sigmoid():
    x = torch.linspace(-4, 4, 41, requires_grad=True)
    assert_close(temperature_sigmoid(x, 0.5), (2 * x).sigmoid())
    assert_close(log_temperature_sigmoid(x, 0.5).exp(), (2 * x).sigmoid())
    assert temperature_sigmoid(x.bfloat16(), 0.3).dtype == torch.bfloat16
    assert log_temperature_sigmoid(torch.tensor(-1e4), 0.1) == -1e5
    for temperature in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(PruneError, match=f"temperature is {temperature}"):
            temperature_sigmoid(x, temperature)


@pytest.mark.parametrize(("kind", "alpha"), [("alpha", 1.5), ("alpha", 8.0), ("temperature", 4.0)])
def test_table_inside_another_kernel(kind, alpha):
    numba = pytest.importorskip("numba")
    from kvprune.ops.alpha_sigmoid.table import gate_table, log_gate, log_gate_slope

    @numba.njit
    def both(x, table, value, slope):
        for i in range(x.size):
            value[i] = log_gate(x[i], table)
            slope[i] = log_gate_slope(x[i], table)

    x = scores(alpha)
    value, slope = torch.full_like(x, math.nan), torch.full_like(x, math.nan)
    both(x.numpy(), gate_table(kind, alpha), value.numpy(), slope.numpy())
    if kind == "alpha":
        want = value_and_grad(log_alpha_sigmoid, x, alpha, "reference")
    else:
        leaf = x.clone().requires_grad_()
        want = log_temperature_sigmoid(leaf, 1 / alpha)
        want = want.detach(), *torch.autograd.grad(want.sum(), leaf)
    assert_close(value, want[0], rtol=2e-7, atol=1e-7)
    assert_close(slope, want[1], rtol=1e-6, atol=1e-6 * alpha)


def test_unknown_gate():
    from kvprune.ops.alpha_sigmoid.table import gate_table

    with pytest.raises(PruneError, match="'beta'"):
        gate_table("beta", 2.0)
    with pytest.raises(PruneError, match=r"alpha is 0\.5"):
        gate_table("alpha", 0.5)
