"""Every decode implementation does what a loop over rows, tokens and heads does."""

import math

import pytest
import torch

from decoding import TOLERANCE, Oracle, held, leavers, new_table, run
from kvprune.cache.slots import SlotTable
from kvprune.errors import PruneError
from kvprune.ops.decode import DECODE, NewToken, Votes, decode
from kvprune.ops.form import AttentionForm

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
every_store = pytest.mark.parametrize("store", ["slots", "extents"])


def every_backend(test):
    choose = pytest.mark.parametrize("backend", DECODE.available())
    return choose(every_dtype(every_store(test)))


@every_backend
@pytest.mark.parametrize("D", [16, 63, 64, 80])
@pytest.mark.parametrize(("B", "G", "R"), [(1, 1, 1), (3, 3, 8), (5, 1, 64), (2, 3, 64)])
def test_odd_shapes(backend, dtype, store, D, B, G, R):
    _, gone = run(backend, dtype, store, 14, B=B, G=G, D=D, R=R, beta=1.0, seed=D + B)
    assert gone


@every_backend
def test_several_hundred_steps(backend, dtype, store):
    table, gone = run(backend, dtype, store, 300, B=2, H=1, G=3, beta=2.0, idle=0.1)
    assert gone > 300
    assert table.kept.max() > 50


@every_backend
def test_rows_that_lose_everything(backend, dtype, store):
    table, _ = run(backend, dtype, store, 20, beta=-100.0)
    assert table.kept.tolist() == [1, 1, 1]


@every_backend
def test_idle_rows_change_nothing(backend, dtype, store):
    table, _ = run(backend, dtype, store, 40, idle=0.5, beta=1.0)
    none, _ = run(backend, dtype, store, 3, idle=1.0)
    assert table.kept.max() > 1
    assert none.kept.tolist() == [0, 0, 0]


@every_backend
def test_protected_tokens_stay(backend, dtype, store):
    table, gone = run(backend, dtype, store, 40, beta=-100.0, protect_first=3, protect_recent=4)
    # a vote at a distance of exactly protect_recent does not count
    assert held(table) == [{0, 1, 2, 35, 36, 37, 38, 39}] * 3
    assert gone


@every_backend
def test_a_score_at_the_threshold_drops(backend, dtype, store):
    table, one = (
        new_table(store, 2, 1, 16, rank=4, dtype=dtype),
        torch.ones(2, 1, 1, 16, dtype=dtype),
    )
    for t, beta in enumerate([0.0, 1e-3 - 2, -2.0]):
        votes = Votes(torch.ones(2, 4) / 2, torch.ones(2, 4), torch.tensor(beta))
        new = NewToken(one, one, one, torch.full((2,), t))
        decode(table, new, AttentionForm(1.0), votes=votes, backend=backend)
        # q·k/√r = 2
        assert held(table) == [{2} if beta == -2 else set(range(t + 1))] * 2
    votes = Votes(torch.ones(2, 4) / 2, torch.ones(2, 4), 0.0, threshold=2.0)
    new = NewToken(one, one, one, torch.full((2,), 3))
    decode(table, new, AttentionForm(1.0), votes=votes, backend=backend)
    assert held(table) == [{3}, {3}]


@every_backend
def test_infinite_thresholds(backend, dtype, store):
    """No score is ≤ −∞, so that every token stays, unless the score itself is −∞."""
    table, gone = run(backend, dtype, store, 30, threshold=-math.inf)
    assert gone == 0
    assert table.kept.tolist() == [30, 30, 30]
    table, _ = run(backend, dtype, store, 30, threshold=math.inf)
    assert table.kept.tolist() == [1, 1, 1]
    table, _ = run(backend, dtype, store, 30, threshold=-math.inf, beta=-math.inf)
    assert table.kept.tolist() == [1, 1, 1]


@every_backend
def test_a_score_of_nan_keeps(backend, dtype, store):
    table, gone = run(backend, dtype, store, 10, beta=math.nan)
    assert gone == 0
    assert table.kept.tolist() == [10, 10, 10]


@every_backend
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
def test_softcap_and_values_of_another_width(backend, dtype, store, softcap):
    run(backend, dtype, store, 30, G=3, D=16, Dv=24, softcap=softcap)


@every_backend
def test_without_votes_nothing_leaves(backend, dtype, store):
    table, gone = run(backend, dtype, store, 50, R=0, voting=False)
    assert gone == 0
    assert table.kept.tolist() == [50, 50, 50]


@every_backend
@pytest.mark.parametrize("voting", [True, False])
def test_the_caller_can_drop_too(backend, dtype, store, voting):
    table, oracle = new_table(store, 3, 2, 16, rank=4 * voting, dtype=dtype), Oracle(3)
    for t in range(40):
        x, query = torch.randn(3, 2, 1, 16).to(dtype), torch.randn(3, 4, 1, 16).to(dtype)
        votes = Votes(torch.randn(3, 4) / 2, torch.randn(3, 4), 3.0, protect_first=2)
        votes = votes if voting else None
        slots = table.get()
        also_drop = (torch.rand(slots.valid.shape) < 0.03) & slots.valid
        also = {(b, int(slots.token[b, s])) for b, s in also_drop.nonzero().tolist()}
        active = torch.tensor([True, True, t % 3 > 0])
        new, form = NewToken(query, x, x, torch.full((3,), t), active), AttentionForm(0.25)
        got = decode(table, new, form, votes=votes, also_drop=also_drop, backend=backend)
        want, left = oracle.step(new, form, votes, also)
        assert leavers(got) == left
        assert held(table) == [set(row) for row in oracle.rows]
        torch.testing.assert_close(
            got.output.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@every_backend
def test_weights_and_extra_columns_follow_their_tokens(backend, dtype, store):
    """Summed by slot, the attention that tokens received equals the sum by token (as H2O does)."""
    torch.manual_seed(0)
    table = new_table(store, 3, 2, 16, dtype=dtype, extra={"received": ()})
    received = [{} for _ in range(3)]
    for t in range(50):
        key, query = torch.randn(3, 2, 1, 16).to(dtype), torch.randn(3, 4, 1, 16).to(dtype)
        active = torch.tensor([True, t % 4 > 0, True])
        slots = table.get()
        also_drop = (torch.rand(slots.valid.shape) < 0.05) & slots.valid
        extra = {"received": torch.zeros(3, 1)}
        new = NewToken(query, key, key, torch.full((3,), t), active, extra)
        got = decode(
            table, new, AttentionForm(0.25), also_drop=also_drop, weights=True, backend=backend
        )
        slots = table.get()
        p = got.weights.sum(1)  # (B, S)
        assert p.shape == slots.valid.shape
        torch.testing.assert_close(p.sum(1), active * 4.0)
        table.set_column("received", table.column("received") + p)
        again = (got.weights.view(3, 2, 2, -1) @ slots.values.float()).view(3, 4, 1, 16)
        torch.testing.assert_close(got.output[active], again.to(dtype)[active])
        for b in active.nonzero()[:, 0].tolist():
            for s in slots.valid[b].nonzero()[:, 0].tolist():
                number = int(slots.token[b, s])
                received[b][number] = received[b].get(number, 0.0) + float(p[b, s])
    for b in range(3):
        for s in slots.valid[b].nonzero()[:, 0].tolist():
            want = received[b][int(slots.token[b, s])]
            assert float(table.column("received")[b, s]) == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_the_cpu_backend_packs_what_it_is_given():
    table = SlotTable(1, 1, 16, min_load=0.0)
    key = torch.randn(1, 1, 8, 16)
    table.push(key, key, None, torch.arange(8)[None])
    table.remove(torch.tensor([[True, False, True, False, False, False, False, False]]))
    assert not table.packed
    query, key = torch.randn(1, 1, 1, 16), torch.randn(1, 1, 1, 16)
    new, form = NewToken(query, key, key, torch.tensor([8])), AttentionForm(0.25)
    # packing moves token 7 while the mask marks its old slot
    also_drop = table.get().token == 7
    plain = table.clone()
    got = decode(table, new, form, also_drop=also_drop, backend="cpu")
    want = decode(plain, new, form, also_drop=also_drop, backend="reference")
    torch.testing.assert_close(got.output, want.output)
    assert table.packed
    assert held(table) == held(plain) == [{1, 3, 4, 5, 6, 8}]


@every_backend
def test_takes_the_views_that_a_model_makes(backend, dtype, store):
    """Heads split off one fused projection, as GPT-2 has it, need not be contiguous."""
    fused = torch.randn(3, 1, 3 * 32, requires_grad=True).to(dtype)
    heads = [x.view(3, 1, 2, 16).transpose(1, 2) for x in fused.split(32, dim=2)]
    table, new = new_table(store, 3, 2, 16, dtype=dtype), NewToken(*heads, torch.arange(3))
    got = decode(table, new, AttentionForm(1.0), backend=backend)
    assert got.output.equal(heads[2].detach())


@every_backend
def test_refuses_what_does_not_fit(backend, dtype, store):
    x, form = torch.ones(2, 2, 1, 16, dtype=dtype), AttentionForm(1.0)
    new = NewToken(x, x, x, torch.zeros(2, dtype=torch.int64))
    table = new_table(store, 2, 2, 16, dtype=dtype, extra={"score": ()})
    with pytest.raises(PruneError, match="score"):
        decode(table, new, form, backend=backend)
    table = new_table(store, 2, 2, 16, rank=4, dtype=dtype)
    with pytest.raises(PruneError, match="key_int"):
        decode(table, new, form, backend=backend)
    with pytest.raises(PruneError, match="also_drop"):
        decode(table, new, form, also_drop=torch.ones(2, 1) > 0, backend=backend)
    with pytest.raises(PruneError, match="3 query heads"):
        decode(table, new._replace(query=torch.ones(2, 3, 1, 16)), form, backend=backend)
    with pytest.raises(PruneError, match="sinks"):
        decode(table, new, AttentionForm(1.0, sinks=torch.zeros(2)), backend=backend)
    assert table.width == 0


@every_store
def test_memory_comes_back(store):
    table = new_table(store, 2, 2, 16, rank=4)
    x = torch.randn(2, 2, 500, 16)
    table.push(x, x, torch.randn(2, 500, 4), torch.arange(500).expand(2, 500))
    before, one = table.nbytes, torch.randn(2, 2, 1, 16)
    votes = Votes(torch.randn(2, 4), torch.randn(2, 4), -100.0)
    new = NewToken(one, one, one, torch.full((2,), 500))
    decode(table, new, AttentionForm(0.25), votes=votes, backend="cpu")
    assert table.nbytes < before / 20


def test_the_backend_is_chosen_or_refused():
    assert DECODE.best_backend(torch.ones(1)) == "cpu"
    assert DECODE.best_backend(torch.ones(1, dtype=torch.bfloat16)) == "cpu"
    wide, x = SlotTable(1, 1, 16, dtype=torch.float64), torch.ones(1, 1, 1, 16).double()
    assert DECODE.best_backend(wide.keys) == "reference"
    new, form = NewToken(x, x, x, torch.tensor([0])), AttentionForm(1.0)
    with pytest.raises(PruneError, match="float64"):
        decode(wide, new, form, backend="cpu")
    with pytest.raises(PruneError, match="'gpu'"):
        decode(wide, new, form, backend="gpu")


def test_takes_as_many_threads_as_torch():
    import numba

    from kvprune.ops.threads import use_threads

    torchs = torch.get_num_threads()
    for threads in (1, torchs):
        torch.set_num_threads(threads)
        use_threads()
        assert numba.get_num_threads() == min(threads, numba.config.NUMBA_NUM_THREADS)
