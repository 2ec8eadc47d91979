"""Arena: memory for extents, in chunks, within a budget.

An extent is a span of bytes that one row of one layer owns. The arena knows nothing of tokens: it
finds a span, takes it back, and closes the gaps between extents when they add up to too much.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from kvprune.cache.chunk import ALIGN, Chunk, Extent, Owner
from kvprune.errors import BudgetError
from kvprune.utils.parse import in_bytes

# a new chunk takes a 32nd of what is held, within limits
CHUNK_SHARE = 32
MIN_CHUNK, MAX_CHUNK = 2**13, 2**26
# a chunk is for so many extents, or for one: two or three would leave an end that fits none
MIN_EXTENTS = 8
# gaps may take a 16th of what is held, or so much
GAP_SHARE, MIN_GAPS = 16, 2**14


class Arena:
    """Chunks of one device. Several caches may share one, and with it one budget.

    `held` is what the chunks take, `used` what the extents take. The rest is gaps, which `settle`
    keeps below a sixteenth of what is held and the newest chunk, where it can. With a budget no
    more than that is ever held: what would not fit is refused, and nothing has changed.
    An arena that is not `shared` belongs to one cache, and is copied with it.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        budget: int | str | None = None,
        shared: bool = True,
    ):
        self.device, self.shared = torch.device(device), shared
        self.budget = in_bytes(budget, "budget") if isinstance(budget, str) else budget
        self.chunks: list[Chunk] = []
        self.held = self.used = 0

    def take(self, size: int, owner: Owner) -> Extent:
        """An extent of at least this many bytes."""
        size = -(-size // ALIGN) * ALIGN
        chunk, index = self._best(self.chunks, size) or self._make_room(size)
        extent = Extent(chunk, chunk.take(index, size), size, owner)
        chunk.extents[extent.offset] = extent
        self.used += size
        return extent

    def give(self, extent: Extent) -> None:
        """Take an extent back; a chunk without extents is released."""
        chunk = extent.chunk
        del chunk.extents[extent.offset]
        chunk.give(extent.offset, extent.size)
        self.used -= extent.size
        if not chunk.used:
            self._release(chunk)

    def settle(self) -> None:
        """Close gaps if they have become too large; extents move, and their owners are told."""
        gaps, some = self.held - self.used, self.held // (2 * GAP_SHARE)
        newest = self.chunks[-1].size if self.chunks else 0
        if gaps > max(2 * some, MIN_GAPS) + newest:
            self.close_gaps(some, self._usual())

    def trim(self) -> None:
        """Leave hardly any gaps: for when nothing more is expected soon."""
        if (self.held - self.used) * 2 * CHUNK_SHARE > self.held:
            self.close_gaps(self.held // (4 * CHUNK_SHARE))

    def close_gaps(self, leave: int = 0, chunk_size: int = 0) -> None:
        """Rewrite the emptiest chunks until no more than `leave` bytes of gaps are left.

        Of the emptiest the least must be moved, and the most is won. What fits into no gap goes to
        a new chunk, of at least this size: its free end is for what comes next.
        """
        for chunk in sorted(self.chunks, key=lambda chunk: chunk.used / chunk.size):
            newest = self.chunks[-1]
            end = newest.size - newest.used if chunk_size else 0
            if self.held - self.used - end <= leave:
                return
            if chunk is not newest or not chunk_size:
                self._rewrite(chunk, chunk_size)

    def refuse(self, size: int) -> None:
        """Raise unless extents of this many bytes in all fit the budget."""
        if self.budget is not None and self.used + size > self.budget:
            raise BudgetError(asked=size, held=self.used, allowed=self.budget)

    def __deepcopy__(self, memo: dict[int, object]) -> Arena:
        """The same if others use it too, else an empty one: a table that is copied fills it."""
        new = self if self.shared else Arena(self.device, self.budget, shared=False)
        memo[id(self)] = new
        return new

    def __iter__(self) -> Iterator[Extent]:
        return itertools.chain.from_iterable(chunk.extents.values() for chunk in self.chunks)

    def _best(self, chunks: Iterable[Chunk], size: int) -> tuple[Chunk, int] | None:
        """The smallest gap that is large enough, as a chunk and the index of the gap."""
        best, place = 0, None
        for chunk in chunks:
            gap = chunk.best_gap(size) if chunk.size - chunk.used >= size else None
            if gap is not None and (place is None or gap[0] < best):
                best, place = gap[0], (chunk, gap[1])
        return place

    def _make_room(self, size: int) -> tuple[Chunk, int]:
        usual = self._usual()
        for chunk in (usual if size * MIN_EXTENTS <= usual else size, size):
            if self._allows(chunk):
                return self._add(chunk), 0
        self.close_gaps()
        if self._allows(size):
            return self._add(size), 0
        if place := self._best(self.chunks, size):
            return place
        assert self.budget is not None
        raise BudgetError(asked=size, held=self.held, allowed=self.budget)

    def _usual(self) -> int:
        """The size of a new chunk."""
        size = min(max(self.held // CHUNK_SHARE, MIN_CHUNK), MAX_CHUNK)
        if self.budget is not None:
            size = min(size, self.budget // (2 * CHUNK_SHARE))
        return size // ALIGN * ALIGN

    def _allows(self, size: int) -> bool:
        return self.budget is None or self.held + size <= self.budget

    def _add(self, size: int) -> Chunk:
        chunk = Chunk(size, self.device)
        self.chunks.append(chunk)
        self.held += size
        return chunk

    def _release(self, chunk: Chunk) -> None:
        self.chunks.remove(chunk)
        self.held -= chunk.size

    def _rewrite(self, chunk: Chunk, chunk_size: int) -> None:
        """Move a chunk's extents, the largest first, and release it.

        If there is no room for those that fit into no gap, they stay, side by side.
        """
        others = [other for other in self.chunks if other is not chunk]
        for extent in sorted(chunk.extents.values(), key=lambda extent: -extent.size):
            if place := self._best(others, extent.size):
                self._move(extent, *place)
        size = max(chunk.used, chunk_size)
        if 0 < chunk.used < chunk.size and self._allows(size):
            rest = self._add(size)
            for extent in list(chunk.extents.values()):
                self._move(extent, rest, 0)
        if chunk.used:
            chunk.slide()
        else:
            self._release(chunk)

    def _move(self, extent: Extent, chunk: Chunk, index: int) -> None:
        """Move an extent into a gap of another chunk."""
        extent.chunk.give(extent.offset, extent.size)
        extent.move(chunk, chunk.take(index, extent.size))
