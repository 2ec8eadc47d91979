"""Drop steps and hard attention in the interpreter against the plain versions."""

import math

import pytest
import torch
from torch.testing import assert_close

from helpers import random, real_tokens
from kvprune.ops.attend.triton_tiles import Tiles
from kvprune.ops.form import AttentionForm
from kvprune.ops.hard import hard_attention
from kvprune.ops.hard import triton as hard
from kvprune.ops.keep.drop import drop_steps
from kvprune.ops.keep.drop import triton as drop
from kvprune.ops.timeline import NEVER, Protection, make_timeline

CPU = torch.device("cpu")
# float32 sums in another order may put a score this close to the threshold on its other side
TIE = 1e-5
CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    tiles = Tiles(16, "ieee", widen=True)
    monkeypatch.setattr(hard, "tiles_for", lambda *operands: tiles)
    monkeypatch.setattr(hard, "CHUNK", 32)
    # lists of two blocks of queries at a time
    monkeypatch.setattr(hard, "WORKSPACE", 200)
    monkeypatch.setattr(drop, "tiles_for", lambda *operands: tiles)


def ballot(B, T, P=0, R=5, threshold=0.0, beta=1.5):
    """Votes without a tie: queries that have one vote on nothing, their scores are β alone."""
    q, k = random(B, T, R, seed=1) / math.sqrt(R), random(B, P + T, R, seed=2)
    q, k, beta = q.float(), k.float(), torch.tensor(beta)
    scores = q.double() @ k.double().transpose(1, 2) + beta.double()
    tied = ((scores - threshold).abs() < TIE).any(-1, keepdim=True)
    return q.masked_fill(tied, 0.0), k, beta


def times(B, T, padding="none", protect=(0, 0), P=0):
    """A timeline; with P keys of a cache before it, in any order and some of their slots free."""
    rules = Protection(*protect)
    timeline = make_timeline(real_tokens(B, T, padding), (B, T), CPU, rules, start=2 * P)
    if not P:
        return timeline
    draw = torch.Generator().manual_seed(3)
    token = torch.stack([torch.randperm(2 * P, generator=draw)[:P] for _ in range(B)])
    return timeline.after(token, torch.rand(B, P, generator=draw) < 0.8, rules)


def check_drop(votes, timeline, threshold=0.0):
    want = drop_steps(*votes, timeline, threshold, block=8, backend="reference")
    got = drop_steps(*votes, timeline, threshold, backend="triton")
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    return want


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize(("protect", "P"), [((0, 0), 0), ((1, 2), 21), ((4, 9), 1)])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (2, 16), (3, 33)])
def test_drop_steps(padding, protect, P, B, T):
    steps = check_drop(ballot(B, T, P), times(B, T, padding, protect, P))
    if T > 30:
        dropped = (steps > torch.arange(-P, T)) & (steps < NEVER)
        assert 0 < int(dropped.sum()) < dropped.numel(), "all or nothing was dropped"


@pytest.mark.parametrize("threshold", [-math.inf, -0.3, math.inf])
@pytest.mark.parametrize("R", [1, 17])
def test_threshold_and_rank(threshold, R):
    check_drop(ballot(2, 40, R=R, threshold=threshold), times(2, 40), threshold)


def test_a_tie_is_a_vote_to_drop():
    zeros, beta, time = torch.zeros(1, 3, 2), torch.tensor(0.25), times(1, 3)
    got = drop_steps(zeros, zeros, beta, time, 0.25, backend="triton")
    assert got.tolist() == [[1, 2, NEVER]]
    got = drop_steps(zeros, zeros, beta, time, 0.2499, backend="triton")
    assert got.tolist() == [[NEVER] * 3]


def test_everything_is_dropped_at_once():
    steps = check_drop(ballot(2, 35, beta=-9.0), times(2, 35))
    assert (steps[:, :-1] == torch.arange(1, 35)).all()


def inputs(B, heads, kv_heads, T, past, D, V, dtype, kept=0.2):
    """As the projections of a host leave them: heads side by side in each token."""

    def make(tokens, h, d, seed):
        return random(B, tokens, h, d, seed=seed).to(dtype).transpose(1, 2)

    q, k, v = make(T, heads, D, 0), make(past + T, kv_heads, D, 1), make(past + T, kv_heads, V, 2)
    index, draw = torch.arange(-past, T), torch.Generator().manual_seed(0)
    life = (30 * torch.rand(B, past + T, generator=draw) ** 2).long()
    # a key of a cache has outlived all before the first query
    steps = index.clamp(min=-1) + 1 + life
    return q, k, v, steps.where(torch.rand(B, past + T, generator=draw) > kept, NEVER)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(
    ("B", "heads", "kv_heads", "T", "past", "D", "V"),
    [
        (1, 1, 1, 1, 0, 2, 1),
        (2, 4, 2, 16, 9, 16, 16),
        (1, 3, 1, 49, 0, 20, 8),
        (1, 2, 2, 17, 70, 8, 8),
    ],
)
def test_hard_attention(dtype, B, heads, kv_heads, T, past, D, V):
    q, k, v, steps = inputs(B, heads, kv_heads, T, past, D, V, dtype)
    for sinks, cap in ((None, None), (random(heads, seed=5), 2.0)):
        form = AttentionForm(0.4, cap, sinks=None if sinks is None else sinks.to(dtype))
        got = hard_attention(q, k, v, steps, form, backend="triton")
        assert got.dtype == dtype
        form = form._replace(sinks=None if sinks is None else form.sinks.double())
        want = hard_attention(q.double(), k.double(), v.double(), steps, form, backend="reference")
        assert_close(got.double(), want, atol=CLOSE[dtype], rtol=CLOSE[dtype])


@pytest.mark.parametrize("padding", ["left", "right"])
def test_hard_attention_with_pads(padding):
    """From votes to the output of real tokens; pads see themselves."""
    q, k, v, _ = inputs(3, 2, 1, 35, 0, 8, 8, torch.float32)
    time = times(3, 35, padding)
    steps = check_drop(ballot(3, 35), time)
    got = hard_attention(q, k, v, steps, AttentionForm(0.4), backend="triton")
    want = hard_attention(q, k, v, steps, AttentionForm(0.4), backend="reference")
    assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_dropped_keys_are_not_read():
    q, k, v, _ = inputs(1, 2, 1, 64, 0, 8, 8, torch.float32)
    steps = torch.full((1, 64), NEVER)
    steps[0, 5:16] = 20
    want = hard_attention(q, k, v, steps, AttentionForm(0.4), backend="triton")[:, :, 32:]
    k, v = k.clone(), v.clone()
    k[:, :, 5:16], v[:, :, 5:16] = math.nan, math.nan
    got = hard_attention(q, k, v, steps, AttentionForm(0.4), backend="triton")[:, :, 32:]
    assert_close(got, want, atol=0, rtol=0)
