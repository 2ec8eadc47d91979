"""A budget is never exceeded, and what it refuses costs nothing, or says what it cost."""

import pytest
import torch

import kvprune
import zoo
from helpers import random_ids, uneven_gates
from kvprune import Arena, BudgetError, PrunedCache, PruneError
from kvprune.cache.extents import ExtentTable


def attached(name="llama"):
    pruned = kvprune.attach(zoo.make(name).eval(), kvprune.PruningConfig(rank=8))
    uneven_gates(pruned)
    return pruned


def read(pruned, ids, cache):
    with torch.inference_mode():
        return pruned.model(ids, past_key_values=cache).logits


def test_the_budget_is_read_from_text_and_numbers():
    pruned = attached()
    assert PrunedCache(pruned, budget="512MB").storage.budget == 512_000_000
    assert PrunedCache(pruned, budget=1000).storage.budget == 1000
    assert Arena(budget="1KiB").budget == 1024
    with pytest.raises(PruneError, match="budget 'lots'"):
        PrunedCache(pruned, budget="lots")
    with pytest.raises(PruneError, match="one of arena and budget"):
        PrunedCache(pruned, budget=1, arena=Arena())
    with pytest.raises(PruneError, match="store='extents'"):
        PrunedCache(pruned, budget=1, store="slots")


def test_a_decode_step_that_does_not_fit_changes_nothing():
    """Checked for all layers together, before the first."""
    pruned, ids = attached(), random_ids(3, 200)
    cache = PrunedCache(pruned, budget=20_000)
    read(pruned, ids[:, :4], cache)
    t, error = 4, None
    while error is None:
        before = cache.seen, cache.kept.tolist()
        try:
            read(pruned, ids[:, t : t + 1], cache)
            t += 1
        except BudgetError as refused:
            error = refused
        assert cache.nbytes <= 20_000
    assert "every row is as it was" in str(error)
    assert error.rows == ()
    assert error.asked > 0
    assert error.held + error.asked > error.allowed == 20_000
    assert (cache.seen, cache.kept.tolist()) == before
    # with room again it goes on as if nothing had happened
    free = PrunedCache(pruned)
    read(pruned, ids[:, :4], free)
    for step in range(4, t):
        read(pruned, ids[:, step : step + 1], free)
    cache.storage.arena.budget = None
    want = read(pruned, ids[:, t : t + 1], free)
    torch.testing.assert_close(read(pruned, ids[:, t : t + 1], cache), want, atol=1e-5, rtol=1e-5)


def test_a_prompt_that_does_not_fit_leaves_an_empty_cache():
    pruned, ids = attached(), random_ids(3, 100)
    free = PrunedCache(pruned)
    read(pruned, ids, free)
    cache = PrunedCache(pruned, budget=int(free.nbytes * 0.8))
    with pytest.raises(BudgetError, match="every row is as it was") as raised:
        read(pruned, ids, cache)
    assert raised.value.rows == ()
    assert (cache.seen, cache.nbytes) == (0, 0)
    read(pruned, ids[:1], cache)


def test_a_later_part_that_does_not_fit_says_what_must_be_read_again():
    pruned, ids = attached(), random_ids(3, 100)
    free = PrunedCache(pruned)
    read(pruned, ids, free)
    cache = PrunedCache(pruned, budget=int(free.nbytes * 0.8))
    read(pruned, ids[:, :30], cache)
    with pytest.raises(BudgetError, match=r"rows \[0, 1, 2\] must be read again") as raised:
        read(pruned, ids[:, 30:], cache)
    assert raised.value.rows == (0, 1, 2)
    with pytest.raises(PruneError, match=r"broke off.*cache.reset\(\)"):
        read(pruned, ids[:, :1], cache)
    cache.reset()
    assert cache.nbytes == 0
    read(pruned, ids[:, :30], cache)


def test_any_error_on_the_way_is_noticed():
    pruned, ids = attached(), random_ids(1, 20)
    cache = PrunedCache(pruned)
    read(pruned, ids, cache)
    last = pruned.sites[-1].module

    def fail(*_):
        raise RuntimeError("interrupted")

    hook = last.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="interrupted"):
        read(pruned, ids, cache)
    hook.remove()
    with pytest.raises(PruneError, match="broke off"):
        read(pruned, ids, cache)


def test_caches_that_share_an_arena_share_its_budget():
    pruned, ids = attached(), random_ids(1, 60)
    free = PrunedCache(pruned)
    read(pruned, ids, free)
    arena = Arena(budget=int(free.nbytes * 2.5))
    first, second, third = (PrunedCache(pruned, arena=arena) for _ in range(3))
    read(pruned, ids, first)
    read(pruned, ids, second)
    assert first.nbytes + second.nbytes <= arena.held
    with pytest.raises(BudgetError):
        read(pruned, ids, third)
    # what a cache held goes back when it is gone
    del first
    read(pruned, ids, third)
    assert arena.used == second.nbytes + third.nbytes
    del second, third
    assert arena.held == 0


def test_dropping_is_never_refused():
    """A row that shrinks moves if there is room for both copies, and else stays where it is."""
    table = ExtentTable(1, 2, 8, rank=4, arena=Arena(budget=0))
    table.arena.budget = table.layout.nbytes(100) + 64
    heads = torch.ones(1, 2, 100, 8)
    table.push(heads, heads, torch.ones(1, 100, 4), torch.arange(100)[None])
    table.remove(torch.arange(100)[None] >= 90 - 15)
    assert table.kept.tolist() == [75]
    assert table.capacity.tolist() == [100]
    # with room again it moves
    table.arena.budget = None
    table.remove(torch.zeros(1, 75, dtype=torch.bool))
    assert table.capacity.tolist() == [80]
    assert table.row(0)["token"].tolist() == list(range(75))
