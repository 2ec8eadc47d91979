"""Layout: how one extent holds the tokens of one row in one layer."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvprune.cache.chunk import ALIGN
from kvprune.errors import PruneError
from kvprune.ops.decode.table import HEAD_MAJOR, PLACES

if TYPE_CHECKING:
    from kvprune.ops.jit import Array

# capacities of extents are multiples of this
STEP = 4

# how keys, values and interaction keys may be stored besides the model's own dtype
KV_FORMS = ("int8",)
INT_FORMS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
}


class Section(NamedTuple):
    """One column of an extent: (heads, capacity, width), or (capacity, width) without heads."""

    dtype: torch.dtype
    heads: int | None
    width: int | None  # None: one number per slot (and head)

    def shape(self, capacity: int) -> tuple[int, ...]:
        shape = (self.heads, capacity, self.width)
        return tuple(size for size in shape if size is not None)

    @property
    def slot_nbytes(self) -> int:
        return math.prod(self.shape(1)) * self.dtype.itemsize


class Layout:
    """The columns of an extent, one after the other, each with room for all slots.

    Keys and values are head-major, so that a head's survivors are one span. In int8 every key and
    value has a scale per head: number = scale · int8. The columns that a method stores lie side by
    side in `extra`, by slot.
    """

    def __init__(
        self,
        heads: int,
        key_dim: int,
        value_dim: int,
        rank: int,
        extra: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        kv: str | None = None,
        key_int: str | None = None,
    ):
        if kv is not None and kv not in KV_FORMS:
            raise PruneError(f"kv={kv!r} is unknown; choose {', '.join(KV_FORMS)} or None")
        if key_int is not None and key_int not in INT_FORMS:
            raise PruneError(
                f"key_int={key_int!r} is unknown; choose one of {', '.join(INT_FORMS)}"
            )
        self.dtype = dtype  # of keys and values outside
        self.stored = torch.int8 if kv == "int8" else dtype
        # votes that flip are never taken back: narrow only where keys and values are
        exact = dtype.itemsize >= 4 and kv is None
        self.int_stored = INT_FORMS[key_int or ("float32" if exact else "float16")]
        self.heads, self.key_dim, self.value_dim, self.rank = heads, key_dim, value_dim, rank
        self.extra = dict(extra)
        f16 = torch.float16
        self.sections = {
            "keys": Section(self.stored, heads, key_dim),
            "values": Section(self.stored, heads, value_dim),
            "key_int": Section(self.int_stored, None, rank),
            "extra": Section(torch.float32, None, sum(map(math.prod, self.extra.values()))),
            "token": Section(torch.int32, None, None),
        }
        if self.scaled:
            self.sections["key_scale"] = self.sections["value_scale"] = Section(f16, heads, None)
        if self.int_stored is torch.int8:
            self.sections["key_int_scale"] = Section(f16, None, None)
        # wide numbers first: every section then begins at a multiple of its own
        order = sorted(self.sections, key=lambda name: -self.sections[name].dtype.itemsize)
        self.slot_nbytes = 0  # bytes of one slot, all columns
        self.starts: dict[str, int] = {}  # where each section begins, in bytes per slot before it
        for name in order:
            self.starts[name] = self.slot_nbytes
            self.slot_nbytes += self.sections[name].slot_nbytes
        # heads, and bytes per slot and head, of each column that kernels know; (0, 0) if empty
        self.widths = [self._width(name) for name in PLACES[:-1]]
        self._places = np.array([self.starts.get(name, 0) for name in PLACES[:-1]] + [1])
        self._address = np.array([1] * (len(PLACES) - 1) + [0])

    @property
    def scaled(self) -> bool:
        """Whether keys and values have scales."""
        return self.stored is torch.int8

    @property
    def align(self) -> int:
        """Bytes of which all columns of vectors start at a multiple, if capacities are of STEP."""
        columns = ("keys", "values", "key_int")
        return math.gcd(ALIGN, *(STEP * self.starts[name] for name in columns))

    @property
    def dense_nbytes(self) -> int:
        """Bytes of one token's key and value in a dense cache."""
        return self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    @property
    def form(self) -> tuple[object, ...]:
        """Equal for layouts that read each other's extents."""
        sizes = self.heads, self.key_dim, self.value_dim, self.rank, dict(self.extra)
        return *sizes, self.dtype, self.stored, self.int_stored

    def nbytes(self, capacity: int) -> int:
        """Bytes of an extent."""
        return capacity * self.slot_nbytes

    def places(self, address: int, capacity: int) -> Array:
        """The addresses of the sections in the order of `PLACES`, which ends in the capacity."""
        places: Array = address * self._address + capacity * self._places
        return places

    def views(self, memory: Tensor, capacity: int) -> dict[str, Tensor]:
        """The sections of an extent as tensors."""
        views = {}
        for name, start in self.starts.items():
            section = self.sections[name]
            span = memory[start * capacity : (start + section.slot_nbytes) * capacity]
            views[name] = span.view(section.dtype).view(section.shape(capacity))
        return views

    def _width(self, name: str) -> tuple[int, int]:
        section = self.sections.get(name)
        if section is None or not section.slot_nbytes:
            return 0, 0
        heads = section.heads or 1
        return heads, section.slot_nbytes // heads


def copy_slots(layout: Layout, source: tuple[Tensor, int], to: tuple[Tensor, int], n: int) -> None:
    """Copy the first n slots of an extent to another; each is given as memory and capacity."""
    if source[0].device.type != "cpu":
        old, new = layout.views(*source), layout.views(*to)
        for name, column in old.items():
            by_slot(name, new[name])[:n] = by_slot(name, column)[:n]
        return
    # a head's slots are one span: a few plain copies take less time than as many views
    first, second = (memory.data_ptr() for memory, _ in (source, to))
    starts = layout.places(first, source[1]).tolist(), layout.places(second, to[1]).tolist()
    for old, new, (heads, size) in zip(*starts, layout.widths, strict=False):
        for head in range(heads):
            ctypes.memmove(new + head * to[1] * size, old + head * source[1] * size, n * size)


def by_slot(name: str, column: Tensor) -> Tensor:
    """A column with its slots first: (capacity, ...)."""
    return column.transpose(0, 1) if name in HEAD_MAJOR else column
