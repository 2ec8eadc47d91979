"""The decode step of Triton, in its interpreter, does what loops and the torch reference do."""

import math

import pytest
import torch

from decoding import TOLERANCE, held, leavers, new_table, run
from kvprune.cache.extents import ExtentTable
from kvprune.ops.decode import REMOVE, NewToken, Votes, decode
from kvprune.ops.decode import triton as on_gpu
from kvprune.ops.form import AttentionForm
from poisoned_memory import poisoned

every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda x: str(x).split(".")[-1])


def steps(dtype=torch.float32, store="extents", steps=6, **options):
    return run("triton", dtype, store, steps, **{"B": 2, "H": 1, **options})


@every_dtype
@pytest.mark.parametrize(
    ("store", "H", "G", "D", "Dv", "R"),
    [("extents", 1, 1, 16, 16, 1), ("slots", 2, 3, 63, 20, 8), ("extents", 1, 8, 80, 33, 64)],
)
def test_odd_shapes(dtype, store, H, G, D, Dv, R):
    _, gone = steps(dtype, store, 8, H=H, G=G, D=D, Dv=Dv, R=R, beta=0.5, seed=D, idle=0.1)
    assert gone


def test_rows_that_lose_everything():
    table, _ = steps(beta=-100.0, G=4, idle=0.3)
    assert table.kept.tolist() == [1, 1]


def test_idle_rows_change_nothing():
    table, _ = steps(idle=1.0)
    assert table.kept.tolist() == [0, 0]


def test_protected_tokens_stay():
    table, _ = steps(steps=10, beta=-100.0, protect_first=2, protect_recent=3)
    assert held(table) == [{0, 1, 6, 7, 8, 9}] * 2


@pytest.mark.parametrize(
    ("threshold", "beta", "kept"),
    [(-math.inf, 2.0, 6), (math.inf, 2.0, 1), (-math.inf, -math.inf, 1), (0.0, math.nan, 6)],
)
def test_scores_that_are_not_finite(threshold, beta, kept):
    table, _ = steps(threshold=threshold, beta=beta)
    assert table.kept.tolist() == [kept, kept]


def test_a_score_at_the_threshold_drops():
    table, one = new_table("extents", 1, 1, 16, rank=4), torch.ones(1, 1, 1, 16)
    for t, (beta, stay) in enumerate([(0.0, {0}), (1e-3 - 2, {0, 1}), (-2.0, {2})]):
        # q·k/√r = 2
        votes = Votes(torch.ones(1, 4) / 2, torch.ones(1, 4), torch.tensor(beta))
        new = NewToken(one, one, one, torch.tensor([t]))
        decode(table, new, AttentionForm(1.0), votes=votes, backend="triton")
        assert held(table) == [stay]


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap):
    steps(G=3, Dv=24, softcap=softcap)


def test_without_votes_nothing_leaves():
    table, gone = steps(R=0, voting=False)
    assert (gone, table.kept.tolist()) == (0, [6, 6])


def filled(rows, count, dtype=torch.float32, seed=0, **options):
    """A table with `count` tokens in its longest row, and a function for more numbers."""
    random = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=random).to(dtype)

    table = ExtentTable(
        rows, 2, 16, value_dim=20, rank=8, extra={"score": ()}, dtype=dtype, **options
    )
    token = torch.arange(count).expand(rows, count)
    # rows end one after the other
    valid = token < (count - torch.arange(rows) * 7)[:, None]
    key, value, key_int = (
        randn(rows, 2, count, 16), randn(rows, 2, count, 20), randn(rows, count, 8)
    )  # fmt: skip
    table.push(key, value, key_int, token, valid, score=token.float())
    return table, randn


def compare(table, randn, form, also_drop=None, active=None, weights=False):
    """One step of Triton beside one of the reference, on a copy."""
    B, number = table.rows, torch.full((table.rows,), 1000)
    query, key, value = randn(B, 6, 1, 16), randn(B, 2, 1, 16), randn(B, 2, 1, 20)
    votes = Votes(randn(B, 8).float() / 3, randn(B, 8).float(), torch.tensor([0.4]), 0.1, 2, 3)
    new = NewToken(query, key, value, number, active, {"score": number[:, None].float()})
    other = table.clone()
    options = {"votes": votes, "also_drop": also_drop, "weights": weights}
    got = decode(table, new, form, **options, backend="triton")
    want = decode(other, new, form, **options, backend="reference")
    assert leavers(got) == leavers(want)
    assert got.dropped.equal(want.dropped)
    assert got.output.dtype == query.dtype
    atol = TOLERANCE[query.dtype]
    torch.testing.assert_close(got.output, want.output, atol=atol, rtol=atol)
    assert table.kept.equal(other.kept)
    for b in range(B):
        order, wanted = table.row(b)["token"].argsort(), other.row(b)["token"].argsort()
        for name, column in other.row(b).items():
            assert table.row(b)[name][order].equal(column[wanted]), name
        assert table.row(b)["extra"][:, 0].equal(table.row(b)["token"].float())
    return got, want


FORMS = [
    {},
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16},
    {"dtype": torch.bfloat16, "kv": "int8", "key_int": "int8"},
    {"kv": "int8", "key_int": "bfloat16", "rotate": False},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("span", [256, 64])
def test_every_form_of_storage(form, span, monkeypatch):
    """With a span of 64, long rows are split and combined."""
    monkeypatch.setattr(on_gpu, "MIN_SPAN", span)
    with poisoned():
        table, randn = filled(2, 150, **form)
        got, _ = compare(table, randn, AttentionForm(0.25))
    assert 10 < (got.dropped >= 0).sum() < 250


@pytest.mark.parametrize("count", [1, 8, 63, 64, 65, 128, 257])
def test_edges_of_blocks(count, monkeypatch):
    monkeypatch.setattr(on_gpu, "MIN_SPAN", 64)
    monkeypatch.setattr(on_gpu, "PLAN_BLOCK", 64)
    with poisoned():
        table, randn = filled(1, count, seed=count)
        compare(table, randn, AttentionForm(0.25, 20.0))


def test_uneven_and_idle_rows_that_are_split(monkeypatch):
    monkeypatch.setattr(on_gpu, "MIN_SPAN", 16)
    with poisoned():
        # the last row is empty
        table, randn = filled(4, 21)
        active = torch.tensor([True, False, True, True])
        also_drop = torch.zeros(4, table.width, dtype=torch.bool)
        # nothing is left for a whole span, and of the last slots none can fill a hole
        also_drop[0] = True
        also_drop[2, -9:] = True
        compare(table, randn, AttentionForm(0.25), also_drop, active)
    assert table.kept[0] == 1


def test_weights_come_from_the_reference():
    table, randn = filled(2, 20)
    got, want = compare(table, randn, AttentionForm(0.25), weights=True)
    assert got.weights.equal(want.weights)


def test_heads_too_wide_for_the_kernels():
    table, x = ExtentTable(1, 1, 300), torch.randn(1, 1, 1, 300)
    new = NewToken(x, x, x, torch.tensor([0]))
    got = decode(table, new, AttentionForm(0.1), backend="triton")
    torch.testing.assert_close(got.output, x)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_remove(share):
    table, _ = filled(3, 70, kv="int8")
    other = table.clone()
    mask = torch.rand(3, 70, generator=torch.Generator().manual_seed(0)) < share
    REMOVE.implementation(table.stored, "triton")(table, mask)
    REMOVE.implementation(other.stored, "reference")(other, mask)
    assert held(table) == held(other)
    for b in range(3):
        order, wanted = table.row(b)["token"].argsort(), other.row(b)["token"].argsort()
        for name, column in other.row(b).items():
            assert table.row(b)[name][order].equal(column[wanted]), name
