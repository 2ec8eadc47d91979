"""Kernels beside the host: it decides about room by bounds, and never waits for what it is told."""

import itertools

import pytest
import torch

from arenas import check_arena
from experiments.triton_soak import Soak
from kvprune.cache import lengths
from kvprune.cache.arena import Arena
from kvprune.cache.extents import ExtentTable
from kvprune.errors import BudgetError
from kvprune.ops.decode import NewToken, Votes, decode
from kvprune.ops.form import AttentionForm

FORM = AttentionForm(0.25)


def apart(rows=1, **options):
    """A table that takes its kernels for those of a GPU."""
    table = ExtentTable(rows, 1, 16, rank=4, **options)
    table.apart = True
    return table


def step(table, number, beta):
    x = torch.ones(table.rows, 1, 1, 16)
    votes = Votes(torch.zeros(table.rows, 4), torch.zeros(table.rows, 4), beta)
    new = NewToken(x, x, x, torch.full((table.rows,), number))
    return decode(table, new, FORM, votes=votes, backend="triton")


def fill(table, numbers):
    for number in numbers:
        step(table, number, beta=1.0)


@pytest.fixture
def waits(monkeypatch):
    """How often the host has waited; reads arrive when `late` says so."""
    count = itertools.count()
    original = lengths.Lengths.wait

    def wait(self):
        next(count)
        original(self)

    monkeypatch.setattr(lengths.Lengths, "wait", wait)
    return lambda: next(count)


def test_bounds_follow_reads(waits, monkeypatch):
    late = False
    monkeypatch.setattr(lengths.Read, "arrived", lambda self: not late)
    table = apart()
    fill(table, range(6))
    assert (table._most.tolist(), table.kept.tolist()) == ([6], [6])
    step(table, 6, beta=-1.0)
    late = True
    # nobody has told the host that one token is left
    fill(table, range(7, 10))
    assert (table._most.tolist(), table.kept.tolist()) == ([10], [4])
    late = False
    # the read that arrives now is from before; the next one, from when there were four
    fill(table, range(10, 12))
    assert (table._most.tolist(), table.kept.tolist()) == ([6], [6])
    assert waits() == 0
    assert table.row(0)["token"].sort().values.tolist() == [6, 7, 8, 9, 10, 11]
    assert table._lengths is None


def test_memory_comes_back(waits):
    table = apart()
    fill(table, range(40))
    before = table.nbytes
    for number in range(40, 44):
        step(table, number, beta=-1.0)
    assert table.nbytes < before / 4
    check_arena(table.arena, [table])
    assert waits() == 0


def test_a_budget_waits_before_it_refuses(waits, monkeypatch):
    monkeypatch.setattr(lengths.Read, "arrived", lambda self: False)
    nbytes = ExtentTable(1, 1, 16, rank=4).slot_nbytes
    table = apart(arena=Arena(budget=nbytes * 24))
    for number in range(30):
        step(table, number, beta=-1.0)
    assert waits() > 0
    assert table.kept.tolist() == [1]
    with pytest.raises(BudgetError):
        fill(table, range(30, 60))


def test_random_steps_against_sets():
    soak = Soak(seed=1)
    for number in range(1, 151):
        soak.step(number)
    soak.end()
    assert soak.dropped > 40
    assert soak.moves_of_rows > 10
