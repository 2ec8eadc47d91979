"""Hard attention's kernel against the plain version in float32, and its inner product."""

import numpy as np
import pytest
import torch

from helpers import random
from kvprune.errors import PruneError
from kvprune.ops import hard
from kvprune.ops.form import AttentionForm
from kvprune.ops.hard import HARD_ATTENTION, hard_attention, reference, tile
from kvprune.ops.jit import njit
from kvprune.ops.never import NEVER

FORM = AttentionForm(0.3)
# outputs are means of values around 1: half a unit in the last place of bfloat16, and as much again
# for the weights
CLOSE = {"atol": 0.02, "rtol": 0}


def inputs(B, heads, kv_heads, T, past, D, width, kept=0.2, seed=0):
    """As the projections of a host leave them: heads side by side in each token."""

    def make(tokens, h, d, seed):
        return random(B, tokens, h, d, seed=seed).to(torch.bfloat16).transpose(1, 2)

    q = make(T, heads, D, seed)
    k, v = make(past + T, kv_heads, D, seed + 1), make(past + T, kv_heads, width, seed + 2)
    index = torch.arange(-past, T)
    draw = torch.Generator().manual_seed(seed)
    life = (70 * torch.rand(B, past + T, generator=draw) ** 2).long()
    # a key of a cache has outlived all before the first query
    steps = index.clamp(min=-1) + 1 + life
    return q, k, v, steps.where(torch.rand(B, past + T, generator=draw) > kept, NEVER)


def wide(q, k, v, steps):
    return reference.hard_attention(q.float(), k.float(), v.float(), steps, FORM)


@pytest.mark.parametrize("backend", HARD_ATTENTION.available(exclude="reference"))
@pytest.mark.parametrize(
    ("B", "heads", "kv_heads", "T", "past", "D", "width"),
    [
        (1, 1, 1, 1, 0, 2, 1),
        (2, 2, 2, 5, 0, 6, 6),
        (1, 4, 2, 1, 9, 64, 64),
        (3, 6, 2, 97, 0, 32, 32),
        (2, 9, 3, 130, 70, 64, 64),
        (1, 4, 1, 200, 3, 128, 80),
        (1, 2, 1, 193, 64, 80, 130),
    ],
)
def test_matches_reference(backend, B, heads, kv_heads, T, past, D, width):
    given = inputs(B, heads, kv_heads, T, past, D, width)
    got = hard_attention(*given, FORM, backend)
    assert got.dtype is torch.bfloat16
    assert got.shape == (B, heads, T, width)
    torch.testing.assert_close(got.float(), wide(*given), **CLOSE)


@pytest.mark.parametrize("kept", [0.0, 1.0], ids=["all are dropped", "none is"])
def test_extremes(kept):
    given = inputs(2, 2, 1, 120, 10, 16, 16, kept=kept)
    if not kept:
        given = (*given[:3], torch.arange(-10, 120).clamp(min=-1).expand(2, -1) + 1)
    got = hard_attention(*given, FORM, "cpu")
    torch.testing.assert_close(got.float(), wide(*given), **CLOSE)
    if not kept:
        # a query that sees itself alone gives its own value
        assert torch.equal(got, given[2][:, :, 10:].expand(-1, 2, -1, -1))


def test_pads_see_themselves():
    q, k, v, steps = inputs(1, 2, 2, 20, 0, 8, 8)
    steps[0, :5] = torch.arange(5)
    got = hard_attention(q, k, v, steps, FORM, "cpu")
    torch.testing.assert_close(got.float(), wide(q, k, v, steps), **CLOSE)
    assert torch.equal(got[:, :, :5], v[:, :, :5])


def test_every_layout():
    """Rows, heads and tokens in any order, and vectors that begin at an odd address."""
    q, k, v, steps = inputs(2, 4, 2, 50, 0, 8, 8)
    want = hard_attention(q, k, v, steps, FORM, "cpu")
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]
    spread = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (q, k, v)]
    for other in ([x.contiguous() for x in (q, k, v)], odd, spread):
        assert torch.equal(hard_attention(*other, steps, FORM, "cpu"), want)


def test_large_scores_do_not_overflow():
    q, k, v, steps = inputs(1, 1, 1, 40, 0, 8, 8)
    given = q * 100, k * 10, v, steps
    got = hard_attention(*given, FORM, "cpu")
    torch.testing.assert_close(got.float(), wide(*given), **CLOSE)


def test_keys_dropped_before_a_block_are_not_read():
    q, k, v, steps = inputs(1, 2, 1, 200, 0, 8, 8)
    steps[0, 5:40] = 60
    want = hard_attention(q, k, v, steps, FORM, "cpu")[:, :, 96:]
    k, v = k.clone(), v.clone()
    k[:, :, 5:40] = v[:, :, 5:40] = torch.nan
    assert torch.equal(hard_attention(q, k, v, steps, FORM, "cpu")[:, :, 96:], want)


def test_what_the_kernel_cannot_do_is_the_references(monkeypatch):
    monkeypatch.setattr(tile, "has_bfloat16_products", lambda: True)
    q, k, v, steps = inputs(1, 2, 1, 30, 0, 8, 8)
    chosen = []

    def note(x, backend):
        chosen.append(backend)
        return reference.hard_attention

    monkeypatch.setattr(HARD_ATTENTION, "implementation", note)
    hard_attention(q, k, v, steps, FORM)
    assert chosen == [None]
    sinks = torch.zeros(2, dtype=torch.bfloat16)
    for form in (
        AttentionForm(1.0, 5.0),
        AttentionForm(1.0, sinks=sinks),
        AttentionForm(1.0, None, 0.1),
    ):
        hard_attention(q, k, v, steps, form)
    hard_attention(q.clone().requires_grad_(), k, v, steps, FORM)
    hard_attention(q.float(), k.float(), v.float(), steps, FORM)
    hard_attention(q[..., :7], k[..., :7], v, steps, FORM)
    monkeypatch.setattr(tile, "has_bfloat16_products", lambda: False)
    hard_attention(q, k, v, steps, FORM)
    assert chosen[1:] == ["reference"] * 7


def test_a_wrong_dtype_by_name_is_refused():
    q, k, v, steps = inputs(1, 1, 1, 3, 0, 4, 4)
    with pytest.raises(PruneError, match="takes bfloat16"):
        hard_attention(q.float(), k.float(), v.float(), steps, FORM, "cpu")


@pytest.mark.parametrize("instruction", [True, False], ids=["instruction", "float32"])
@pytest.mark.parametrize("steps", [0, 1, 37])
def test_product(monkeypatch, instruction, steps):
    """With the CPU's instruction, if it has one, and put together from float32."""
    if instruction and not tile.has_bfloat16_products():
        pytest.skip("this CPU does not multiply bfloat16")
    monkeypatch.setattr(tile, "has_bfloat16_products", lambda: instruction)
    multiply = tile.multiply

    @njit()
    def run(c, column, a, b, first, steps):
        multiply(c, column, a, b, first, steps)

    a = random(tile.ROWS, 2 * 40, seed=0).to(torch.bfloat16)
    b = random(2 * 50, tile.COLUMNS, seed=1).to(torch.bfloat16)
    # pairs of neighbours in a row of a, and in a column of b
    pairs_a = a.view(torch.int32).numpy().view(np.uint32)
    pairs_b = b.view(50, 2, -1).transpose(1, 2).contiguous().view(torch.int32)[..., 0].numpy()
    c = np.full((tile.ROWS, 100), -1.0, np.float32)
    run(c, 30, pairs_a, np.ascontiguousarray(pairs_b).view(np.uint32), 10, steps)
    want = a.float()[:, : 2 * steps] @ b.float()[20 : 20 + 2 * steps]
    torch.testing.assert_close(
        torch.from_numpy(c[:, 30 : 30 + tile.COLUMNS]), want, atol=1e-4, rtol=1e-5
    )
    assert (c[:, :30] == -1).all()
    assert (c[:, 30 + tile.COLUMNS :] == -1).all()


def test_what_triton_does_not_take_is_the_references():
    def fits(D=64, learns=False, **form):
        q = torch.empty(1, 2, 4, D, device="meta", requires_grad=learns)
        return hard._fits_kernel(q, q, q, AttentionForm(0.3, **form))

    assert fits()
    assert fits(D=256, softcap=30.0, sinks=torch.zeros(2))
    assert not fits(D=257)
    assert not fits(learns=True)
    assert not fits(dropout=0.1)
