"""The oracle, against numbers computed by hand and a vectorised cumprod."""

import math

import pytest
import torch
from torch.testing import assert_close

import oracle
from helpers import random

ALPHAS = [1.0, 1.0001, 1.3, 1.5, 2.0, 2.5, 3.0, 4.0, 8.0, 64.0]


def test_alpha_sigmoid_by_hand():
    assert oracle.alpha_sigmoid(0.3, 1) == pytest.approx(1 / (1 + math.exp(-0.3)), abs=1e-15)
    assert oracle.alpha_sigmoid(0.3, 2) == pytest.approx((1 + 0.3) / 2, abs=1e-15)
    assert oracle.alpha_sigmoid(-0.3, 3) == pytest.approx(0.5 - 0.3, abs=1e-15)
    # α = 1.5: √p − √(1−p) = x/2, so p = (1 + (x/2)·√(2 − x²/4)) / 2
    assert oracle.alpha_sigmoid(1.2, 1.5) == pytest.approx((1 + 0.6 * math.sqrt(1.64)) / 2)
    assert oracle.alpha_sigmoid(1e-9, math.inf) == 1
    assert oracle.alpha_sigmoid(0.0, math.inf) == 0


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alpha_sigmoid_solves_its_equation(alpha):
    edge = 20.0 if alpha == 1 else min(20.0, 1 / (alpha - 1))
    for share in [-0.999, -0.6, -0.1, 0.0, 0.2, 0.7, 0.999]:
        x = share * edge
        p = oracle.alpha_sigmoid(x, alpha)
        assert 0 < p < 1
        if alpha == 1:
            assert math.log(p / (1 - p)) == pytest.approx(x, abs=1e-6)
        else:
            left = (p ** (alpha - 1) - (1 - p) ** (alpha - 1)) / (alpha - 1)
            assert left == pytest.approx(x, abs=1e-6)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 4.0, 64.0])
def test_alpha_sigmoid_saturates(alpha):
    edge = 1 / (alpha - 1)
    assert oracle.alpha_sigmoid(-edge, alpha) == 0
    assert oracle.alpha_sigmoid(edge, alpha) == 1
    assert oracle.alpha_sigmoid_slope(-edge, alpha) == oracle.alpha_sigmoid_slope(edge, alpha) == 0


@pytest.mark.parametrize("alpha", [alpha for alpha in ALPHAS if alpha <= 8])
def test_slope_equals_the_difference_quotient(alpha):
    step = 1e-6
    for share in [-0.9, -0.3, 0.0, 0.5, 0.9]:
        x = share * (3.0 if alpha == 1 else min(3.0, 1 / (alpha - 1)))
        rise = oracle.alpha_sigmoid(x + step, alpha) - oracle.alpha_sigmoid(x - step, alpha)
        assert oracle.alpha_sigmoid_slope(x, alpha) == pytest.approx(rise / (2 * step), rel=1e-5)


def test_slope_where_p_rounds_to_one():
    # α = 1.8, 1 − p = 1e-17: the slope is 1 / ((1e-17)^−0.2 + 1) although p is 1.0 in float64
    x = -math.expm1(0.8 * math.log(1e-17)) / 0.8
    assert oracle.alpha_sigmoid(x, 1.8) == 1.0
    assert oracle.alpha_sigmoid_slope(x, 1.8) == pytest.approx(1 / (1e17**0.2 + 1), rel=0.02)


def test_gate_has_the_implicit_gradient():
    x = (random(20) / 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: oracle.gate(x, 1.5), x)
    assert torch.autograd.gradcheck(lambda x: oracle.gate(x, 3.0, "temperature"), x)
    assert_close(oracle.gate(x, 3.0, "temperature"), 1 / (1 + torch.exp(-3 * x)))
    assert_close(oracle.gate(x, math.inf, "temperature"), oracle.gate(x, math.inf))


def test_soft_keep_by_hand():
    # R = 1, α = 2, β = 0: gate = clamp((1 + q·k) / 2)
    q_int = torch.tensor([[[9.0], [0.2], [-0.4], [-7.0]]], dtype=torch.float64)
    k_int = torch.tensor([[[1.0], [0.5], [2.0], [9.0]]], dtype=torch.float64)
    keep = oracle.soft_keep(q_int, k_int, 0.0, 2.0)
    want = [
        [1, 0, 0, 0],
        [0.6, 1, 0, 0],
        [0.6 * 0.3, 0.4, 1, 0],
        [0, 0, 0, 1],
    ]
    assert_close(keep[0], torch.tensor(want, dtype=torch.float64))


@pytest.mark.parametrize("alpha", [1.0, 1.5, 4.0])
def test_soft_keep_is_a_cumprod(alpha):
    B, T, R = 2, 7, 5
    q_int, k_int = (random(B, T, R, seed=seed).requires_grad_() for seed in (1, 2))
    beta = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    weight = random(B, T, T, seed=3)
    inputs = (q_int, k_int, beta)

    keep = oracle.soft_keep(*inputs, alpha)
    gates = oracle.gate(q_int @ k_int.mT / math.sqrt(R) + beta, alpha)
    past = torch.ones(T, T, dtype=torch.bool).tril(-1)
    want = gates.where(past, 1.0).cumprod(dim=-2).tril()
    assert_close(keep, want)
    assert 0 < (keep == 0).sum() < keep.numel()
    got_grads = torch.autograd.grad((keep * weight).sum(), inputs)
    want_grads = torch.autograd.grad((want * weight).sum(), inputs)
    assert_close(got_grads, want_grads)


def test_hard_keep_is_the_limit_of_soft_keep():
    q_int, k_int = random(2, 9, 4, seed=4), random(2, 9, 4, seed=5)
    hard = oracle.hard_keep(q_int, k_int, 0.5)
    assert_close(oracle.soft_keep(q_int, k_int, 0.5, math.inf), hard)
    assert_close(oracle.soft_keep(q_int, k_int, 0.5, 1e6), hard)
    # the threshold shifts the step
    assert_close(oracle.hard_keep(q_int, k_int, 0.8, threshold=0.3), hard)


@pytest.mark.parametrize("options", [{}, {"protect_first": 2}, {"protect_recent": 3}])
@pytest.mark.parametrize("padded", [False, True])
def test_drop_step_agrees_with_hard_keep(options, padded):
    B, T = 3, 9
    q_int, k_int = random(B, T, 4, seed=6), random(B, T, 4, seed=7)
    real = torch.ones(B, T, dtype=torch.bool)
    if padded:
        real[0, :3] = real[1, 6:] = real[2, 4] = False
    keep = oracle.hard_keep(q_int, k_int, 0.3, real=real, **options)
    steps = oracle.drop_step(q_int, k_int, 0.3, real=real, **options)
    assert (steps < T).any()
    assert (steps == oracle.NEVER).any()
    for b in range(B):
        for k in range(T):
            for j in range(T):
                visible = j == k or (bool(real[b, k]) and j <= k < int(steps[b, j]))
                assert keep[b, k, j] == visible
    for b, j in (~real).nonzero().tolist():
        assert steps[b, j] == j


@pytest.mark.parametrize("options", [{}, {"protect_first": 2, "protect_recent": 2}])
def test_padding_does_not_affect_real_tokens(options):
    T = 6
    q_int, k_int = random(1, T, 4, seed=8), random(1, T, 4, seed=9)
    places = [1, 2, 4, 5, 6, 8]
    real = torch.zeros(1, 9, dtype=torch.bool)
    real[0, places] = True
    padded_q, padded_k = random(1, 9, 4, seed=10), random(1, 9, 4, seed=11)
    padded_q[0, places], padded_k[0, places] = q_int[0], k_int[0]

    want = oracle.soft_keep(q_int, k_int, 0.2, 1.5, **options)
    keep = oracle.soft_keep(padded_q, padded_k, 0.2, 1.5, real=real, **options)
    assert_close(keep[0][places][:, places], want[0])
    pads = [0, 3, 7]
    assert_close(keep[0][pads], torch.eye(9, dtype=torch.float64)[pads])
    assert_close(keep[0][:, pads], torch.eye(9, dtype=torch.float64)[:, pads])

    want = oracle.drop_step(q_int, k_int, 0.2, **options)[0].tolist()
    steps = oracle.drop_step(padded_q, padded_k, 0.2, real=real, **options)[0]
    assert steps[places].tolist() == [places[i] if i < T else oracle.NEVER for i in want]


def test_protected_tokens_by_hand():
    # every vote is a drop
    q_int, k_int, T = torch.zeros(1, 5, 1), torch.zeros(1, 5, 1), 5
    never = oracle.NEVER
    assert oracle.drop_step(q_int, k_int, -1.0).tolist() == [[1, 2, 3, 4, never]]
    steps = oracle.drop_step(q_int, k_int, -1.0, protect_first=2)
    assert steps.tolist() == [[never, never, 3, 4, never]]
    steps = oracle.drop_step(q_int, k_int, -1.0, protect_recent=2)
    assert steps.tolist() == [[3, 4, never, never, never]]
    real = torch.tensor([[False, True, False, True, True]])
    steps = oracle.drop_step(q_int, k_int, -1.0, real=real, protect_first=1)
    assert steps.tolist() == [[0, never, 2, 4, never]]
    assert oracle.drop_step(q_int, k_int, 0.0).tolist() == [[1, 2, 3, 4, never]]
    keep = oracle.hard_keep(q_int, k_int, -1.0, protect_recent=2)
    want = oracle.local_keep(T, window=3).float()
    assert_close(keep, want)


def test_depth_tied_is_a_running_product():
    keeps = [oracle.soft_keep(random(1, 4, 2, seed=s), random(1, 4, 2), 0.5, 1.5) for s in range(3)]
    tied = oracle.depth_tied(keeps)
    assert_close(torch.stack(tied), torch.stack(keeps).cumprod(dim=0))


def test_one_token():
    q_int = random(2, 1, 3)
    assert oracle.soft_keep(q_int, q_int, 0.0, 1.5).tolist() == [[[1.0]], [[1.0]]]
    assert oracle.drop_step(q_int, q_int, 0.0).tolist() == [[oracle.NEVER], [oracle.NEVER]]
    assert oracle.sparsity_loss([torch.ones(2, 1, 1)]) == 0
    assert oracle.sparsity([torch.ones(2, 1, 1)]) == [0.0]


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_attention_is_a_softmax(softcap):
    B, H, Hkv, T, D = 2, 4, 2, 5, 3
    q, k, v = (
        random(B, H, T, D, seed=1),
        random(B, Hkv, T, D, seed=2),
        random(B, Hkv, T, D + 1, seed=3),
    )
    keep = oracle.soft_keep(random(B, T, 4, seed=4), random(B, T, 4, seed=5), 0.3, 4.0)
    assert ((keep == 0).tril() != 0).any()
    leaves = [x.requires_grad_() for x in (q, k, v, keep)]
    scaling = 0.7

    output = oracle.attention(q, k, v, keep, scaling, softcap)
    assert output.shape == (B, T, H, D + 1)
    copies = [x.repeat_interleave(H // Hkv, dim=1) for x in (k, v)]
    logits = q @ copies[0].mT * scaling
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    # log of zero has no gradient: mask those entries instead
    log_keep = keep.where(keep > 0, 1.0).log().masked_fill(keep == 0, -math.inf)
    want = ((logits + log_keep[:, None]).softmax(dim=-1) @ copies[1]).transpose(1, 2)
    assert_close(output, want)
    weight = random(B, T, H, D + 1, seed=6)
    got_grads = torch.autograd.grad((output * weight).sum(), leaves)
    assert_close(got_grads, torch.autograd.grad((want * weight).sum(), leaves))


def test_sparsity_loss_by_hand():
    keeps = [torch.tensor([[[1.0, 0, 0], [0.5, 1, 0], [0.25, 0, 1]]]), torch.ones(1, 3, 3)]
    # 2 / (L n (n−1)) Σ
    assert oracle.sparsity_loss(keeps).item() == pytest.approx(2 / (2 * 3 * 2) * (0.75 + 3))
    assert oracle.sparsity(keeps) == [pytest.approx(1 / 3), 0.0]
    # a second row with two real tokens adds one pair per layer to the three
    rows = [torch.cat([keep, torch.zeros(1, 3, 3)]) for keep in keeps]
    real = torch.tensor([[True, True, True], [False, True, True]])
    assert oracle.sparsity_loss(rows, real).item() == pytest.approx((0.75 + 3) / 8)
    assert oracle.sparsity(rows, real) == [pytest.approx(2 / 4), pytest.approx(1 / 4)]


def test_baselines_by_hand():
    local = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 1, 1],
    ]
    assert oracle.local_keep(5, window=2)[0].tolist() == local
    strided = [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 1, 1, 1, 0],
        [0, 1, 0, 1, 1],
    ]
    assert oracle.strided_keep(5, stride=2)[0].tolist() == strided


@pytest.mark.parametrize("pattern", [oracle.local_keep, oracle.strided_keep])
def test_baselines_count_real_tokens(pattern):
    real = torch.tensor([[False, False, True, True, True, True, True, True]])
    assert_close(pattern(8, 3, real)[0, 2:, 2:], pattern(6, 3)[0])
    assert pattern(8, 3, real)[0, :, :2].tolist() == torch.eye(8)[:, :2].tolist()
