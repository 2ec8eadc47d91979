"""The soak of the arena finds what it looks for; the whole of it is in docs/results."""

import json
from pathlib import Path

import pytest

from experiments import arena_soak
from experiments.arena_soak import Soak, run
from kvprune.cache.chunk import Chunk, Extent

RESULT = Path(__file__).parents[2] / "docs/results/arena_soak.json"


def test_a_short_one_with_every_operation_and_refusals(monkeypatch):
    monkeypatch.setattr(arena_soak, "PHASE", 400)
    soak = Soak(seed=1, budget=60_000)
    (row,) = run(soak, 1200, every=1200)
    names = {operation.__name__ for _, operation in soak.operations}
    assert names <= row["done"].keys()
    assert sum(row["refused"].values()) > 3
    assert row["refused"].keys() <= arena_soak.ASKS
    assert 30_000 < row["peak_bytes"] <= 60_000


def lose_a_line(chunk, offset, size):
    give(chunk, offset, size - 64)


def forget_contents(extent, chunk, offset):
    move(extent, chunk, offset)
    extent.bytes.fill_(7)


give, move = Chunk.give, Extent.move


@pytest.mark.parametrize(
    ("of", "name", "broken"),
    [(Chunk, "give", lose_a_line), (Extent, "move", forget_contents)],
)
def test_a_broken_arena_is_found(monkeypatch, of, name, broken):
    monkeypatch.setattr(of, name, broken)
    with pytest.raises(AssertionError):
        list(run(Soak(seed=1, budget=60_000), 1200, every=1200))


def test_the_log_is_of_a_million():
    about, rows = json.loads(RESULT.read_text()).values()
    assert about["command"] == "python -m experiments.arena_soak"
    last = rows[-1]
    assert last["operations"] == 1_000_000
    assert sum(last["done"].values()) + sum(last["refused"].values()) == 1_000_000
    assert last["peak_bytes"] <= last["budget_bytes"]
