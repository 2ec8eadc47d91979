"""Soft attention's kernels against the plain n × n form in float64: output and every gradient."""

import math

import pytest
import torch
from torch.testing import assert_close

import pairs
from kvprune.ops.attend import operator, soft, triton, triton_tiles
from kvprune.ops.attend.soft import soft_attention
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.timeline import Protection, make_timeline

CPU = torch.device("cpu")
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Tiles of 16 × 16, and stripes of two of them where a row has more than 32 tokens."""
    tiles = triton_tiles.Tiles(16, "ieee", widen=True)
    monkeypatch.setattr(triton, "tiles_for", lambda *operands: tiles)
    monkeypatch.setattr(triton, "stripe", lambda B, T, block: min(2, -(-T // block)) * block)


def draw(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def inputs(B, H, Hkv, T, D, V, R, layers=1, beta=1.0, dtype=torch.float32):
    """q, k, v, and of each layer q_int/√r, k_int, β: leaves, and the same numbers in float64."""
    qkv = [draw(B, h, T, d, seed=i) for i, (h, d) in enumerate([(H, D), (Hkv, D), (Hkv, V)])]
    qkv = [x.to(dtype) for x in qkv]
    votes = []
    for i in range(layers):
        q_int, k_int = draw(B, T, R, seed=10 + i) / math.sqrt(R), draw(B, T, R, seed=20 + i)
        votes += [q_int.float(), k_int.float(), torch.tensor(beta + 0.1 * i)]
    leaves = [x.requires_grad_() for x in (*qkv, *votes)]
    return leaves, [x.detach().double().requires_grad_() for x in leaves]


def layers_of(leaves):
    return [tuple(leaves[i : i + 3]) for i in range(3, len(leaves), 3)]


def check(
    B=1, H=2, Hkv=1, T=37, D=8, V=8, R=5, gate=None, layers=1, beta=1.0, real=None,
    protect=(0, 0), softcap=None, sinks=False, dtype=torch.float32, dropout=0.0, factors=None,
):  # fmt: skip
    leaves, wide = inputs(B, H, Hkv, T, D, V, R, layers, beta, dtype)
    gate = gate or Gate("alpha", 1.5)
    timeline = make_timeline(real, (B, T), CPU, Protection(*protect))
    form, wide_form = (AttentionForm(0.4, softcap, dropout) for _ in range(2))
    if sinks:
        own = draw(H, seed=5).to(dtype).requires_grad_()
        other = own.detach().double().requires_grad_()
        form, wide_form = form._replace(sinks=own), wide_form._replace(sinks=other)
    got, kept = soft_attention(
        *leaves[:3], layers_of(leaves), timeline, gate, form, backend="triton"
    )
    keep = pairs.log_keep(layers_of(wide), timeline, gate)
    want = pairs.attention(*wide[:3], keep, wide_form, factors)
    want_kept = pairs.keep_sum(keep)
    near = CLOSE[dtype]
    assert got.dtype == dtype
    assert_close(got.double(), want, atol=near, rtol=near)
    assert_close(kept.double(), want_kept, atol=1e-5, rtol=1e-5)

    weight, share = draw(*want.shape, seed=40), draw(B, seed=41)
    loss = (got * weight.to(dtype)).sum() + (kept * share.float()).sum()
    weight = weight.to(dtype).double()
    loss2 = (want * weight).sum() + (want_kept * share.float().double()).sum()
    if sinks:
        leaves.append(own)
        wide.append(other)
    grads = torch.autograd.grad(loss, leaves)
    wants = torch.autograd.grad(loss2, wide, allow_unused=True, materialize_grads=True)
    for grad, want_grad in zip(grads, wants, strict=True):
        # sums of T terms of either sign, of β of T²
        scale = max(1.0, float(want_grad.abs().max()))
        assert grad.isfinite().all()
        assert_close(grad.double() / scale, want_grad / scale, atol=near, rtol=near)
    return keep


@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 4.0, 8.0])
def test_alphas(alpha):
    keep = check(gate=Gate("alpha", alpha))
    assert alpha < 2 or (keep == -math.inf).tril().any(), "nothing was dropped"


@pytest.mark.parametrize("alpha", [1e6, math.inf])
def test_steep_gates_are_steps(alpha):
    check(gate=Gate("alpha", alpha), T=20)


def test_temperature():
    check(gate=Gate("temperature", 3.0))


@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 33, 50])
def test_odd_lengths(T):
    check(T=T, gate=Gate("alpha", 2.0))


@pytest.mark.parametrize(("H", "Hkv", "D", "V", "R"), [(3, 3, 5, 7, 1), (6, 2, 20, 16, 19)])
def test_heads_and_widths(H, Hkv, D, V, R):
    check(H=H, Hkv=Hkv, T=19, D=D, V=V, R=R)


def rows(T, *pads):
    """Rows of T tokens: a positive number of pads on the left, a negative one on the right."""
    index = torch.arange(T)
    return torch.stack([index >= n if n >= 0 else index < T + n for n in pads])


@pytest.mark.parametrize("pads", [(0, 3), (0, -5), (20, -20), (37, 0)])
def test_padded_and_empty_rows(pads):
    check(B=2, real=rows(37, *pads), gate=Gate("alpha", 2.0))


def test_pads_in_the_middle():
    real = torch.ones(1, 37, dtype=torch.bool)
    real[0, 14:33] = False
    check(real=real, gate=Gate("alpha", 2.0))


@pytest.mark.parametrize("protect", [(2, 0), (1, 18)])
def test_protected_tokens(protect):
    check(protect=protect, gate=Gate("alpha", 4.0), real=rows(37, 4))


def test_tied_with_depth():
    check(layers=3, gate=Gate("alpha", 2.0), real=rows(37, 18), beta=1.5)


def test_everything_is_dropped_but_the_token_itself():
    keep = check(beta=-9.0, gate=Gate("alpha", 4.0), T=35)
    assert (keep.exp() == torch.eye(35)).all()


@pytest.mark.parametrize("form", [{"softcap": 2.0}, {"sinks": True}])
def test_soft_cap_and_sinks(form):
    check(H=4, Hkv=2, **form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    check(dtype=dtype, D=16, V=16, sinks=True)


def test_stripes_and_tiles_change_nothing(monkeypatch):
    """And a second run is the first, bit for bit: no two programs add to one number."""
    leaves, _ = inputs(B=1, H=2, Hkv=1, T=50, D=8, V=8, R=5)

    def run():
        timeline = make_timeline(rows(50, 7), (1, 50), CPU)
        out, kept = soft_attention(
            *leaves[:3], layers_of(leaves), timeline, Gate("alpha", 2.0), AttentionForm(0.4),
            backend="triton",
        )  # fmt: skip
        return out, kept, *torch.autograd.grad(out.sum() + kept.sum(), leaves)

    first = run()
    for got, want in zip(run(), first, strict=True):
        assert torch.equal(got, want)
    tiles = triton_tiles.Tiles(32, "ieee", widen=True)
    monkeypatch.setattr(triton, "tiles_for", lambda *operands: tiles)
    monkeypatch.setattr(triton, "stripe", triton_tiles.stripe)
    for got, want in zip(run(), first, strict=True):
        assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_dropout():
    """With values of 0 and 1 the output is the weights, so that the factors can be read off."""
    T, share = 36, 0.3
    leaves, _ = inputs(B=2, H=2, Hkv=1, T=T, D=8, V=8, R=5)
    timeline, eye = make_timeline(None, (2, T), CPU), torch.eye(T).expand(2, 1, T, T)

    def weights(dropout):
        torch.manual_seed(3)
        form = AttentionForm(0.4, None, dropout)
        with torch.no_grad():
            return soft_attention(
                *leaves[:2], eye, layers_of(leaves), timeline, Gate("alpha", 1.5), form,
                backend="triton",
            )[0].double()  # fmt: skip

    plain, dropped = weights(0.0), weights(share)
    factors = (dropped / plain).where(plain > 0, 0.0)
    alive = factors > 0
    assert_close(factors, alive / (1 - share), atol=1e-5, rtol=1e-5, check_dtype=False)
    # 2,600 draws: a standard deviation is 0.009
    assert abs(float(alive[plain > 0].double().mean()) - (1 - share)) < 0.04
    assert not torch.equal(alive[0, 0], alive[0, 1])
    assert not torch.equal(alive[0], alive[1])
    torch.manual_seed(3)
    check(B=2, T=T, dropout=share, factors=alive / (1 - share))


def test_as_an_operator(monkeypatch):
    """What a compiled graph calls gives the same, in the shapes and strides that it was told."""
    leaves, _ = inputs(B=1, H=2, Hkv=1, T=33, D=8, V=8, R=5)
    # as the projections of a host leave them
    leaves[0] = leaves[0].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    timeline, form = make_timeline(None, (1, 33), CPU), AttentionForm(0.4, 2.0)
    arguments = (*leaves[:3], layers_of(leaves), timeline)
    want = soft_attention(*arguments, Gate("alpha", 1.5), form, backend="triton")
    monkeypatch.setattr(soft.SOFT_FORWARD, "best_backend", lambda x: "triton")
    monkeypatch.setattr(triton_tiles, "tiles_for", triton.tiles_for)
    monkeypatch.setattr(triton_tiles, "stripe", triton.stripe)
    got = operator.soft_attention_in_graph(*arguments, Gate("alpha", torch.tensor(1.5)), form)
    wants = torch.autograd.grad(want[0].sum() + want[1].sum(), leaves)
    for x, y in zip(
        (*got, *torch.autograd.grad(got[0].sum() + got[1].sum(), leaves)),
        (*want, *wants),
        strict=True,
    ):
        assert torch.equal(x, y)
    time = timeline.clock, timeline.visible_from, timeline.votable_from
    given = (
        *leaves[:3], None, leaves[3:], *time, False, "alpha", torch.tensor(1.5), 0.4, 2.0, 0.0,
        torch.tensor(0),
    )  # fmt: skip
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator._forward, given, test_utils=checks)
    done = operator._forward(*given)
    more = (done[0], *done[2:], torch.ones_like(done[0]), torch.ones_like(done[1]))
    given = [x.detach() if isinstance(x, torch.Tensor) else x for x in (*given, *more)]
    given[4] = [x.detach() for x in given[4]]
    torch.library.opcheck(operator._backward, tuple(given), test_utils=checks)
