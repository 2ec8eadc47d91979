"""The arena: no byte lost, none owned twice, gaps bounded, nothing beyond the budget."""

from contextlib import suppress

import pytest
import torch

from kvprune.cache.arena import GAP_SHARE, MIN_GAPS, Arena
from kvprune.errors import BudgetError


class Owner:
    """Extents of random bytes, and what should be in them."""

    def __init__(self):
        self.contents = {}

    def take(self, arena, size, random):
        extent = arena.take(size, self)
        extent.bytes.copy_(torch.randint(256, (extent.size,), generator=random, dtype=torch.uint8))
        self.contents[extent] = extent.bytes.clone()
        return extent

    def give(self, arena, extent):
        del self.contents[extent]
        arena.give(extent)

    def moved(self, extent):
        assert extent in self.contents

    def check(self, arena):
        for extent, want in self.contents.items():
            assert extent.bytes.equal(want)
        check_tiling(arena, self.contents)


def check_tiling(arena, extents):
    assert set(arena) == set(extents)
    assert arena.held == sum(chunk.size for chunk in arena.chunks)
    assert arena.used == sum(extent.size for extent in extents)
    for chunk in arena.chunks:
        spans = [(offset, extent.size) for offset, extent in chunk.extents.items()]
        end = 0
        for offset, size in sorted(spans + chunk.gaps):
            assert offset == end
            end += size
        assert end == chunk.size


@pytest.mark.parametrize("budget", [None, 400_000])
@pytest.mark.parametrize("largest", [300, 5_000, 60_000])
def test_any_sequence_of_sizes(budget, largest):
    arena, owner = Arena(budget=budget), Owner()
    random = torch.Generator().manual_seed(largest)

    def draw(most):
        return int(torch.randint(most, (), generator=random))

    refused = 0
    for step in range(1500):
        extents = list(owner.contents)
        # by turns more is taken than given, and the other way round
        if extents and draw(10) < (7 if step // 250 % 2 else 3):
            owner.give(arena, extents[draw(len(extents))])
        else:
            size = 1 + draw(largest)
            before = len(owner.contents)
            with suppress(BudgetError):
                owner.take(arena, size, random)
            if len(owner.contents) == before:
                refused += 1
                # only what is near the budget is refused
                assert arena.used + size > 0.75 * budget
        arena.settle()
        gaps = arena.held - arena.used
        if budget is None:
            # the newest chunk's free end may come on top
            newest = arena.chunks[-1].size if arena.chunks else 0
            assert gaps <= max(arena.held / GAP_SHARE, MIN_GAPS) + newest
        else:
            assert arena.held <= budget
        if step % 50 == 0:
            owner.check(arena)
    assert (refused > 0) == (budget is not None and largest == 60_000)
    for extent in list(owner.contents):
        owner.give(arena, extent)
    assert (arena.held, arena.used, arena.chunks) == (0, 0, [])


def test_a_refusal_changes_nothing():
    arena, owner = Arena(budget=10_000), Owner()
    random = torch.Generator().manual_seed(0)
    first = owner.take(arena, 6_000, random)
    with pytest.raises(BudgetError, match=r"5,056 more bytes.*of the 10,000") as raised:
        arena.take(5_000, owner)
    assert (raised.value.asked, raised.value.allowed) == (5_056, 10_000)
    owner.check(arena)
    owner.give(arena, first)
    owner.take(arena, 5_000, random)


def test_gaps_are_closed_to_make_room_within_a_budget():
    arena, owner = Arena(budget=64 * 100), Owner()
    random = torch.Generator().manual_seed(0)
    extents = [owner.take(arena, 64 * 10, random) for _ in range(10)]
    for extent in extents[::2]:
        owner.give(arena, extent)
    # half is free, but no two tenths lie side by side
    owner.take(arena, 64 * 20, random)
    owner.check(arena)
    assert arena.held <= arena.budget
