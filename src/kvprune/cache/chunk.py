"""Chunk: one block of memory, which extents share."""

from __future__ import annotations

import bisect
import ctypes
import weakref
from typing import Protocol

import torch
from torch import Tensor

# every extent starts at a multiple of this: one cache line, and the widest vector load
ALIGN = 64


class Owner(Protocol):
    """Who holds an extent."""

    def moved(self, extent: Extent) -> None:
        """The extent is at another address now, with the same contents."""


class Extent:
    """`size` bytes of a chunk, from `offset` on."""

    __slots__ = ("chunk", "offset", "owner", "size")

    def __init__(self, chunk: Chunk, offset: int, size: int, owner: Owner):
        self.chunk, self.offset, self.size = chunk, offset, size
        self.owner = weakref.ref(owner)

    @property
    def address(self) -> int:
        return self.chunk.address + self.offset

    @property
    def bytes(self) -> Tensor:
        return self.chunk.bytes[self.offset : self.offset + self.size]

    def move(self, chunk: Chunk, offset: int) -> None:
        """Copy the contents to another place, which may overlap this one, and tell the owner."""
        if chunk.bytes.device.type == "cpu":
            ctypes.memmove(chunk.address + offset, self.address, self.size)
        else:
            chunk.bytes[offset : offset + self.size] = self.bytes.clone()
        del self.chunk.extents[self.offset]
        self.chunk, self.offset = chunk, offset
        chunk.extents[offset] = self
        if (owner := self.owner()) is not None:
            owner.moved(self)


class Chunk:
    """One block of memory; no two of its gaps are adjacent."""

    def __init__(self, size: int, device: torch.device):
        # an inference tensor could not be written outside of inference mode, where a cache may go
        with torch.inference_mode(False):
            self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.address = self.bytes.data_ptr()
        assert self.address % ALIGN == 0, "torch aligns what it allocates"
        self.size, self.used = size, 0
        self.gaps = [(0, size)]  # (offset, size), by offset
        self.extents: dict[int, Extent] = {}  # by offset

    def best_gap(self, size: int) -> tuple[int, int] | None:
        """(its size, its index), of the smallest gap that holds this many bytes."""
        fits = [(gap, index) for index, (_, gap) in enumerate(self.gaps) if gap >= size]
        return min(fits) if fits else None

    def take(self, index: int, size: int) -> int:
        """The offset of the first `size` bytes of a gap, which are no longer free."""
        offset, gap = self.gaps[index]
        self.gaps[index : index + 1] = [(offset + size, gap - size)] if gap > size else []
        self.used += size
        return offset

    def give(self, offset: int, size: int) -> None:
        """These bytes are free again, and one with the gaps beside them."""
        self.used -= size
        index = bisect.bisect(self.gaps, (offset, 0))
        if index < len(self.gaps) and self.gaps[index][0] == offset + size:
            size += self.gaps.pop(index)[1]
        if index and sum(self.gaps[index - 1]) == offset:
            index -= 1
            offset, before = self.gaps.pop(index)
            size += before
        self.gaps.insert(index, (offset, size))

    def slide(self) -> None:
        """Close all gaps but one, at the end."""
        if not self.gaps or (len(self.gaps) == 1 and sum(self.gaps[0]) == self.size):
            return
        end = 0
        for offset in sorted(self.extents):
            extent = self.extents[offset]
            if offset != end:
                extent.move(self, end)
            end += extent.size
        self.gaps = [(end, self.size - end)]

    def __repr__(self) -> str:
        return f"Chunk({self.used} of {self.size} bytes in {len(self.extents)} extents)"
