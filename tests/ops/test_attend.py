"""Soft and hard attention against the oracle's loops: outputs and every gradient."""

import math

import pytest
import torch
from torch.testing import assert_close

import oracle
from helpers import random, real_tokens
from kvprune.errors import PruneError
from kvprune.ops.attend import soft
from kvprune.ops.attend.soft import soft_attention
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.hard.reference import hard_attention
from kvprune.ops.keep.drop import drop_steps, kept_pairs
from kvprune.ops.timeline import NEVER, Protection, make_timeline

BACKENDS = [("reference", torch.float64), ("reference", torch.float32), ("cpu", torch.float32)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
FORM = AttentionForm(0.4)


def inputs(B, H, Hkv, T, D, R, dtype, layers=1):
    q, k, v = (random(B, h, T, D, seed=i) for i, h in enumerate((H, Hkv, Hkv)))
    votes = [
        (random(B, T, R, seed=10 + i), random(B, T, R, seed=20 + i), random(seed=30 + i) + 1)
        for i in range(layers)
    ]
    flat = [x.to(dtype).requires_grad_() for x in (q, k, v, *(t for vote in votes for t in vote))]
    return flat[:3], [tuple(flat[3 + 3 * i : 6 + 3 * i]) for i in range(layers)]


def twins(qkv, votes):
    """The same numbers in float64, with graphs of their own."""
    copy = [x.detach().double().requires_grad_() for x in (*qkv, *(t for v in votes for t in v))]
    return copy[:3], [tuple(copy[3 + 3 * i : 6 + 3 * i]) for i in range(len(votes))]


def divide(votes):
    """The oracle divides scores by √r itself; soft_attention wants it in q_int."""
    return [(q / math.sqrt(q.shape[-1]), k, beta) for q, k, beta in votes]


def check_soft(
    backend, dtype, B, H, Hkv, T, D, R, alpha, padding="none", kind="alpha", layers=1, block=8,
    protect=(0, 0), softcap=None, sinks=False,
):  # fmt: skip
    qkv, votes = inputs(B, H, Hkv, T, D, R, dtype, layers)
    qkv2, votes2 = twins(qkv, votes)
    real = real_tokens(B, T, padding)
    timeline = make_timeline(real, (B, T), torch.device("cpu"), Protection(*protect))
    sink, sink2 = None, None
    if sinks:
        sink = random(H, seed=5).to(dtype).requires_grad_()
        sink2 = sink.detach().double().requires_grad_()
    form = AttentionForm(0.4, softcap, sinks=sink)
    got, kept = soft_attention(
        *qkv, divide(votes), timeline, Gate(kind, alpha), form, block=block, backend=backend
    )

    keeps = oracle.depth_tied(
        [oracle.soft_keep(*vote, alpha, real, *protect, kind=kind) for vote in votes2]
    )
    want = oracle_attention(qkv2, keeps[-1], softcap, sink2)
    pairs = torch.ones(T, T, dtype=torch.bool).tril(-1).expand(B, T, T)
    seen = torch.ones(B, T, dtype=torch.bool) if real is None else real
    pairs = pairs & seen[:, :, None] & seen[:, None]
    want_kept = keeps[-1].where(pairs, 0.0).sum((1, 2))
    visible = seen[:, None, :, None]
    tolerance = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    assert_close((got * visible).double(), want * visible, **tolerance)
    assert_close(kept.double(), want_kept, **tolerance)

    weight = random(*want.shape, seed=40) * visible
    share = random(B, seed=41)
    loss = (got * weight.to(dtype)).sum() + (kept * share.to(dtype)).sum()
    loss2 = (want * weight).sum() + (want_kept * share).sum()
    leaves = [*qkv, *(t for vote in votes for t in vote)] + ([sink] if sinks else [])
    leaves2 = [*qkv2, *(t for vote in votes2 for t in vote)] + ([sink2] if sinks else [])
    # of a single token nothing depends on the votes
    wants = torch.autograd.grad(loss2, leaves2, allow_unused=T == 1, materialize_grads=T == 1)
    for got_grad, want_grad in zip(torch.autograd.grad(loss, leaves), wants, strict=True):
        # float32 sums of T² terms of either sign
        scale = max(1.0, float(want_grad.abs().max()))
        assert_close(got_grad.double() / scale, want_grad / scale, **tolerance)


def oracle_attention(qkv, keep, softcap=None, sinks=None):
    if sinks is None:
        return oracle.attention(*qkv, keep, 0.4, softcap).transpose(1, 2)
    # a sink is one more key, which every query sees and whose value is 0
    q, k, v = qkv
    groups = q.shape[1] // k.shape[1]
    logits = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(groups, 1)) * 0.4
    logits = logits + keep.log()[:, None]
    column = sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
    weights = torch.softmax(torch.cat([logits, column], -1), -1)[..., :-1]
    return weights @ v.repeat_interleave(groups, 1)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 4.0])
def test_soft_matches_the_oracle(backend, dtype, alpha):
    check_soft(backend, dtype, B=2, H=4, Hkv=2, T=14, D=4, R=5, alpha=alpha)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("padding", ["left", "right"])
def test_soft_with_padding(backend, dtype, padding):
    check_soft(backend, dtype, B=3, H=2, Hkv=1, T=17, D=4, R=3, alpha=1.5, padding=padding)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("protect", [(2, 0), (0, 3), (2, 3)])
def test_soft_with_protected_tokens(backend, dtype, protect):
    check_soft(
        backend, dtype, B=2, H=2, Hkv=2, T=15, D=4, R=3, alpha=3.0, padding="left", protect=protect
    )


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("T", [1, 2, 7, 8, 9, 23])
def test_soft_odd_lengths(backend, dtype, T):
    check_soft(backend, dtype, B=1, H=3, Hkv=3, T=T, D=5, R=1, alpha=2.0)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_soft_tied_with_depth(backend, dtype):
    check_soft(backend, dtype, B=2, H=2, Hkv=1, T=14, D=4, R=3, alpha=1.5, layers=3)


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
def test_soft_with_the_temperature_gate(backend, dtype):
    check_soft(backend, dtype, B=2, H=2, Hkv=1, T=14, D=4, R=3, alpha=3.0, kind="temperature")


@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("extra", [{"softcap": 2.0}, {"sinks": True}])
def test_soft_with_soft_cap_and_sinks(backend, dtype, extra):
    check_soft(backend, dtype, B=2, H=4, Hkv=2, T=14, D=4, R=3, alpha=1.5, **extra)


def test_soft_gradcheck():
    qkv, votes = inputs(B=2, H=2, Hkv=1, T=7, D=3, R=2, dtype=torch.float64)
    timeline = make_timeline(real_tokens(2, 7, "left"), (2, 7), torch.device("cpu"))
    gate, form = Gate("alpha", 1.7), AttentionForm(0.5, softcap=3.0)

    def run(*flat):
        out, kept = soft_attention(*flat[:3], [flat[3:]], timeline, gate, form, block=3)
        real = timeline.clock >= 0
        return out * real[:, None, :, None], kept

    assert torch.autograd.gradcheck(run, (*qkv, *votes[0]))


def test_autocast_does_not_reach_the_scores():
    qkv, votes = inputs(B=2, H=2, Hkv=1, T=33, D=4, R=3, dtype=torch.float32)
    timeline = make_timeline(None, (2, 33), torch.device("cpu"))
    gate = Gate("alpha", 1.5)
    want = soft_attention(*qkv, divide(votes), timeline, gate, FORM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = soft_attention(*qkv, divide(votes), timeline, gate, FORM)
    assert_close(got, want, atol=0, rtol=0)


@pytest.mark.parametrize("split", [1, 6, 20, 29])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_hard_in_two_parts_is_hard_in_one(split, padding):
    """Votes and attention of the last tokens, with the first ones as the keys of a cache."""
    qkv, votes = inputs(B=2, H=4, Hkv=2, T=30, D=6, R=3, dtype=torch.float64)
    q, k, v = (x.detach() for x in qkv)
    q_int, k_int, beta = (x.detach() for x in divide(votes)[0])
    real = real_tokens(2, 30, padding)
    rules, cpu = Protection(1, 2), torch.device("cpu")
    full = make_timeline(real, (2, 30), cpu, rules)
    steps = drop_steps(q_int, k_int, beta, full)
    want = hard_attention(q, k, v, steps, FORM)[:, :, split:]

    head, tail = (None, None) if real is None else (real[:, :split], real[:, split:])
    first = make_timeline(head, (2, split), cpu, rules)
    early = drop_steps(q_int[:, :split], k_int[:, :split], beta, first)
    count = (first.clock >= 0).sum(-1)
    second = make_timeline(tail, (2, 30 - split), cpu, rules, start=count)
    second = second.after(first.clock.long(), early == NEVER, rules)
    assert torch.equal(second.clock, full.clock[:, split:])
    late = drop_steps(q_int[:, split:], k_int, beta, second, block=8)
    merged = torch.cat([early.where(early < NEVER, late[:, :split]), late[:, split:]], -1)
    merged = merged + split * ((late < NEVER) & (late >= -split) & (merged == late))
    assert torch.equal(merged, steps)
    got = hard_attention(q[:, :, split:], k, v, late, FORM, block=8)
    assert_close(got, want, atol=1e-10, rtol=0)
    pairs = kept_pairs(steps, full) - kept_pairs(early, first)
    assert torch.equal(kept_pairs(late, second), pairs)


@pytest.mark.parametrize("block", [1, 5, 64])
def test_soft_does_not_depend_on_the_block(block):
    qkv, votes = inputs(B=2, H=2, Hkv=1, T=33, D=4, R=3, dtype=torch.float64)
    timeline = make_timeline(None, (2, 33), torch.device("cpu"))
    single, split = (
        soft_attention(*qkv, divide(votes), timeline, Gate("alpha", 4.0), FORM, block=size)
        for size in (33, block)
    )
    assert_close(split, single, atol=1e-12, rtol=0)


def test_soft_dropout_is_the_same_in_backward():
    """With dropout the output is linear in v: its gradient must use the very same factors."""
    qkv, votes = inputs(B=2, H=2, Hkv=1, T=40, D=4, R=3, dtype=torch.float64)
    timeline = make_timeline(None, (2, 40), torch.device("cpu"))
    gate, form = Gate("alpha", 1.5), AttentionForm(0.4, dropout=0.5)
    torch.manual_seed(3)
    out, _ = soft_attention(*qkv, divide(votes), timeline, gate, form, block=16)
    weight = random(*out.shape, seed=40)
    (grad,) = torch.autograd.grad((out * weight).sum(), qkv[2])
    assert_close((grad * qkv[2]).sum(), (out * weight).sum())
    plain, _ = soft_attention(*qkv, divide(votes), timeline, gate, FORM)
    assert (out - plain).abs().max() > 0.1, "dropout did nothing"


@pytest.mark.parametrize("alpha", [1e4, 1e6])
def test_soft_at_large_alpha_is_hard(alpha):
    qkv, votes = inputs(B=2, H=2, Hkv=1, T=30, D=4, R=3, dtype=torch.float64)
    timeline = make_timeline(real_tokens(2, 30, "left"), (2, 30), torch.device("cpu"))
    with torch.no_grad():
        soft, kept = soft_attention(*qkv, divide(votes), timeline, Gate("alpha", alpha), FORM)
        steps = drop_steps(*divide(votes)[0], timeline)
        hard = hard_attention(*qkv, steps, FORM)
    real = (timeline.clock >= 0)[:, None, :, None]
    assert_close(soft * real, hard * real, atol=1e-6, rtol=0)
    assert_close(kept, kept_pairs(steps, timeline).double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("T", [1, 2, 13, 32, 33])
@pytest.mark.parametrize("threshold", [0.0, 0.7])
def test_drop_steps(padding, T, threshold):
    _, votes = inputs(B=3, H=1, Hkv=1, T=T, D=1, R=4, dtype=torch.float64)
    real = real_tokens(3, T, padding)
    timeline = make_timeline(real, (3, T), torch.device("cpu"), Protection(1, 2))
    with torch.no_grad():
        got = drop_steps(*divide(votes)[0], timeline, threshold, block=8)
        want = oracle.drop_step(*votes[0], threshold, real, 1, 2)
        keep = oracle.hard_keep(*votes[0], threshold, real, 1, 2)
    assert torch.equal(got, want)
    assert T < 13 or bool(((want > torch.arange(T)) & (want < NEVER)).any()), "nothing was dropped"
    pairs = torch.ones(T, T, dtype=torch.bool).tril(-1)
    assert torch.equal(kept_pairs(got, timeline), (keep * pairs).sum((1, 2)).long())


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": True}])
@pytest.mark.parametrize("T", [1, 7, 26])
def test_hard_matches_the_oracle(padding, extra, T):
    qkv, votes = inputs(B=2, H=4, Hkv=2, T=T, D=6, R=3, dtype=torch.float64)
    qkv2, votes2 = twins(qkv, votes)
    real = real_tokens(2, T, padding)
    timeline = make_timeline(real, (2, T), torch.device("cpu"))
    steps = drop_steps(*divide(votes)[0], timeline)
    sinks = random(4, seed=5) if "sinks" in extra else None
    softcap = extra.get("softcap")
    got = hard_attention(*qkv, steps, AttentionForm(0.4, softcap, sinks=sinks), block=8)
    keep = oracle.hard_keep(*votes2[0], real=real)
    want = oracle_attention(qkv2, keep, softcap, sinks)
    visible = 1.0 if real is None else real[:, None, :, None]
    assert_close(got * visible, want * visible, atol=1e-10, rtol=0)
    weight = random(*want.shape, seed=40) * visible
    for got_grad, want_grad in zip(
        torch.autograd.grad((got * weight).sum(), qkv),
        torch.autograd.grad((want * weight).sum(), qkv2),
        strict=True,
    ):
        assert_close(got_grad, want_grad, atol=1e-10, rtol=0)


def test_a_dropped_token_never_returns():
    _, votes = inputs(B=2, H=1, Hkv=1, T=60, D=1, R=4, dtype=torch.float64)
    timeline = make_timeline(None, (2, 60), torch.device("cpu"))
    value = torch.eye(60, dtype=torch.float64).expand(2, 1, 60, 60)  # output = attention weights
    zeros = torch.zeros(2, 1, 60, 2, dtype=torch.float64)
    steps, gate = drop_steps(*divide(votes)[0], timeline), Gate("alpha", 4.0)
    for weights in (
        hard_attention(zeros, zeros, value, steps, FORM, block=16),
        soft_attention(zeros, zeros, value, divide(votes), timeline, gate, FORM)[0],
    ):
        weights = weights[:, 0].detach()
        past = torch.ones(60, 60, dtype=torch.bool).tril()
        gone = (weights == 0) & past
        assert gone.any()
        assert torch.equal(gone, gone.cummax(dim=1).values & past)


def test_dropped_keys_are_not_read():
    """Keys that were dropped before a block are skipped, not masked: NaN in them does no harm."""
    qkv, _ = inputs(B=1, H=2, Hkv=1, T=64, D=4, R=3, dtype=torch.float64)
    steps = torch.full((1, 64), NEVER)
    steps[0, 5:16] = 20
    q, k, v = (x.detach().clone() for x in qkv)
    want = hard_attention(q, k, v, steps, FORM, block=16)[:, :, 32:]
    k[:, :, 5:16], v[:, :, 5:16] = math.nan, math.nan
    assert_close(hard_attention(q, k, v, steps, FORM, block=16)[:, :, 32:], want)


def test_a_tie_is_a_vote_to_drop():
    """The step function is x > threshold."""
    timeline = make_timeline(None, (1, 3), torch.device("cpu"))
    zeros, beta = torch.zeros(1, 3, 2), torch.tensor(0.25)
    assert drop_steps(zeros, zeros, beta, timeline, 0.25).tolist() == [[1, 2, NEVER]]
    assert drop_steps(zeros, zeros, beta, timeline, 0.2499).tolist() == [[NEVER] * 3]


def test_what_triton_does_not_take_is_the_references(monkeypatch):
    monkeypatch.setattr(soft.SOFT_FORWARD, "best_backend", lambda x: "triton")

    def choice(D=8, R=4, votes=torch.float32, backend=None):
        q, vote = torch.empty(1, 1, 2, D), torch.empty(1, 2, R, dtype=votes)
        return soft.choose(q, q, [vote, vote, torch.empty((), dtype=votes)], backend)

    assert choice(D=256, R=256) == "triton"
    assert choice(backend="cpu") == choice(backend="reference") == "reference"
    for odd in ({"D": 257}, {"R": 257}, {"votes": torch.float64}):
        assert choice(**odd) == "reference"
        with pytest.raises(PruneError, match=r"triton backend takes .* not .*257|float64"):
            choice(**odd, backend="triton")
