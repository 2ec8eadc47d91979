"""SlotTable: where one layer keeps the tokens that it has not dropped."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kvprune.errors import PruneError
from kvprune.ops.decode.table import (
    HEAD_MAJOR,
    PLACES,
    DevicePlaces,
    Members,
    Places,
    join_columns,
    split_columns,
)
from kvprune.ops.decode.table import Slots as Slots

# pack when the longest row fills less than this of the slots that attention reads
MIN_LOAD = 0.9
# release memory when a new storage would be smaller than this share of the old one
MIN_USE = 0.9


def roomy(slots: int) -> int:
    """A capacity with a sixteenth to spare: a resize is then paid for by the pushes before it."""
    return -(-(slots + slots // 16) // 8) * 8


class SlotTable:
    """A batch of rows of slots; tokens take the leftmost free slot and leave for good.

    Paper, "Efficient Memory Allocation": push, get, remove, and
        load factor = tokens of the longest row / width,   width = highest slot in use + 1,
    with a consolidation whenever it falls below `min_load`. Attention reads a set, so tokens
    are free to move between slots: `token` is who sits where, and order has no meaning.

    `columns` holds every per-slot tensor at full capacity, and each follows every operation. The
    caller's own (`extra`: name → trailing shape, float32) lie side by side in one of them.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        rank: int = 0,
        extra: Mapping[str, tuple[int, ...]] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        min_load: float = MIN_LOAD,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        B, H, f32 = rows, heads, torch.float32

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.min_load = min_load
        self.columns = {
            "keys": empty(B, H, 0, head_dim, dtype=dtype),
            "values": empty(B, H, 0, value_dim, dtype=dtype),
            "key_int": empty(B, 0, rank, dtype=f32),
            "token": empty(B, 0, dtype=torch.int32),
            "valid": empty(B, 0, dtype=torch.bool),
        }
        self.extra = dict(extra or {})
        self.columns["extra"] = empty(B, 0, sum(map(math.prod, self.extra.values())), dtype=f32)
        self._places: Places | None = None
        # known to the host, so that `get` and most of `push` need not wait for the device
        self.width = 0
        self.longest = 0
        self.packed = True

    @property
    def keys(self) -> Tensor:
        return self.columns["keys"]

    @property
    def values(self) -> Tensor:
        return self.columns["values"]

    @property
    def key_int(self) -> Tensor:
        return self.columns["key_int"]

    @property
    def token(self) -> Tensor:
        return self.columns["token"]

    @property
    def valid(self) -> Tensor:
        return self.columns["valid"]

    @property
    def rows(self) -> int:
        return self.valid.shape[0]

    @property
    def capacity(self) -> int:
        return self.valid.shape[1]

    @property
    def kept(self) -> Tensor:
        return self.valid[:, : self.width].sum(1)  # (B,)

    @property
    def load_factor(self) -> float:
        return self.longest / self.width if self.width else 1.0

    @property
    def nbytes(self) -> int:
        return sum(column.untyped_storage().nbytes() for column in self.columns.values())

    @property
    def for_kernels(self) -> bool:
        return self.valid.device.type == "cpu"

    @property
    def stored(self) -> Tensor:
        return self.keys

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        B, H, _, D = self.keys.shape
        return (B, H, 1, D), (B, H, 1, self.values.shape[-1]), (B, self.key_int.shape[-1])

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot, all columns."""
        return sum(self._row_nbytes(name) for name in self.columns)

    @property
    def dense_nbytes(self) -> int:
        """Bytes of one token's key and value in a dense cache."""
        return sum(self._row_nbytes(name) for name in ("keys", "values"))

    def get(self) -> Slots:
        S = self.width
        keys, values, key_int = self.keys[:, :, :S], self.values[:, :, :S], self.key_int[:, :S]
        return Slots(keys, values, key_int, *self.members())

    def members(self) -> Members:
        S = self.width
        return Members(self.token[:, :S].long(), self.valid[:, :S])

    def column(self, name: str) -> Tensor:
        return split_columns(self.columns["extra"][:, : self.width], self.extra)[name]

    def set_column(self, name: str, values: Tensor) -> None:
        self.column(name).copy_(values)

    def row(self, b: int) -> dict[str, Tensor]:
        """One row's tokens, by column: slots first."""
        valid = self.valid[b]
        return {name: self._by_slot(name)[b, valid] for name in self.columns if name != "valid"}

    @torch.no_grad()
    def push(
        self,
        key: Tensor,
        value: Tensor,
        key_int: Tensor | None,
        token: Tensor,
        valid: Tensor | None = None,
        **extra: Tensor,
    ) -> None:
        """Give each new token the leftmost free slot of its row; where `valid` is False, none.

        Of the first `longest + T` slots at least T are free in every row, so nothing beyond
        them is ever taken and the new width is known before the slots are.
        """
        B, T = token.shape  # key: (B, H, T, D), value: (B, H, T, Dv), key_int: (B, T, R)
        key_int = key.new_empty(B, T, 0) if key_int is None else key_int
        new = {"keys": key, "values": value, "key_int": key_int, "token": token}
        self.check({**new, **extra})
        if T == 0:
            return
        new["extra"] = join_columns(extra, token)
        if valid is None:
            longest = self.longest + T
            self.reserve(longest)
            taken = self.valid[:, :longest].byte()
            rows = torch.arange(B, device=token.device)[:, None]
            source = torch.arange(T, device=token.device)
            # of equals, argmin gives the first and a stable sort keeps the order
            slots = (
                taken.argmin(1, keepdim=True)
                if T == 1
                else taken.argsort(stable=True, dim=1)[:, :T]
            )  # (B, T)
        else:
            count = valid.sum(1)
            longest = int((self.kept + count).max())
            self.reserve(longest)
            free = ~self.valid[:, :longest]
            # nonzero walks row by row and both masks have equally many per row: they pair up
            rows, source = valid.nonzero(as_tuple=True)
            slots = (free & (free.cumsum(1) <= count[:, None])).nonzero(as_tuple=True)[1]
        for name, x in new.items():
            column = self._by_slot(name)
            x = x.transpose(1, 2) if name in HEAD_MAJOR else x
            column[rows, slots] = x[rows, source].to(column.dtype)
        self.valid[rows, slots] = True
        self.longest = longest
        self.width = max(self.width, longest)

    def remove(self, mask: Tensor) -> None:
        """Free the slots where `mask` (B, S), shaped like `get().valid`, is True."""
        self.valid[:, : self.width] &= ~mask
        self._measure()
        self.consolidate()

    def release(self, rows: Tensor) -> None:
        """Empty entire rows, by index or by mask; the batch keeps its shape."""
        self.valid[rows] = False
        self._measure()
        self.consolidate()

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was: reorders, repeats or leaves out rows (beams)."""
        with torch.inference_mode(False), torch.no_grad():
            for name, column in self.columns.items():
                self.columns[name] = column.index_select(0, rows)
        self._places = None
        self._measure()
        self.consolidate()

    def add_rows(self, count: int) -> None:
        """More rows at the end, empty."""
        with torch.inference_mode(False), torch.no_grad():
            for name, column in self.columns.items():
                more = column.new_zeros(count, *column.shape[1:])
                self.columns[name] = torch.cat([column, more])
        self._places = None

    def put(self, b: int, columns: Mapping[str, Tensor]) -> None:
        """Fill an empty row with what `row` gave, of this table or of one with the same shape."""
        if self.valid[b].any():
            raise PruneError(f"row {b} holds {int(self.kept[b])} tokens; release it first")
        n = len(columns["token"])
        self.reserve(n)
        for name, column in columns.items():
            self._by_slot(name)[b, :n] = column.to(self.columns[name].dtype)
        self.valid[b, :n] = True
        self.width = max(self.width, n)
        self._measure()

    def repeat(self, times: int) -> None:
        """Every row `times` times, copies side by side, like `repeat_interleave`."""
        rows = torch.arange(self.rows, device=self.valid.device)
        self.select(rows.repeat_interleave(times))

    def consolidate(self) -> None:
        """Pack when the load factor is too low; release memory when there is far too much."""
        if self.load_factor < self.min_load:
            self.pack()
        # a tenth of slack below `roomy`'s own: growth and shrinkage never chase each other
        if roomy(self.width) < MIN_USE * self.capacity:
            self._resize(roomy(self.width))

    def pack(self) -> None:
        """Make every row a dense prefix: its last tokens move into its holes, the rest stay."""
        if self.packed:
            return
        valid = self.valid[:, : self.width]
        prefix = torch.arange(self.width, device=valid.device) < self.kept[:, None]  # (B, S)
        # a row has as many tokens beyond its prefix as holes in it, so the two lists pair up
        rows, source = (valid & ~prefix).nonzero(as_tuple=True)
        slots = (prefix & ~valid).nonzero(as_tuple=True)[1]
        for name in self.columns:
            column = self._by_slot(name)
            column[rows, slots] = column[rows, source]
        self.valid[rows, source] = False
        self.packed, self.width = True, self.longest

    def reserve(self, slots: int) -> None:
        if slots > self.capacity:
            self._resize(roomy(slots))

    def clone(self) -> SlotTable:
        return copy.deepcopy(self)

    def to(self, device: torch.device | str) -> SlotTable:
        """Move every column, in place like a module's `to`."""
        self.columns = {name: column.to(device) for name, column in self.columns.items()}
        self._places = None
        return self

    def _by_slot(self, name: str) -> Tensor:
        column = self.columns[name]
        return column.transpose(1, 2) if name in HEAD_MAJOR else column  # (B, S, ...)

    def _measure(self) -> None:
        """Read width, longest and packed from `valid`, with one wait for the device."""
        valid = self.valid[:, : self.width]
        if not valid.numel():
            self.width, self.longest, self.packed = 0, 0, True
            return
        slot = torch.arange(1, self.width + 1, device=valid.device)
        kept, top = valid.sum(1), (valid * slot).amax(1)  # (B,), (B,)
        width, longest, holes = torch.stack((top.max(), kept.max(), (top - kept).max())).tolist()
        self.width, self.longest, self.packed = width, longest, holes == 0

    def _resize(self, capacity: int) -> None:
        S, self._places = self.width, None
        with torch.inference_mode(False), torch.no_grad():
            for name, old in self.columns.items():
                axis = 2 if name in HEAD_MAJOR else 1
                shape = (*old.shape[:axis], capacity, *old.shape[axis + 1 :])
                new = torch.empty(shape, dtype=old.dtype, device=old.device)
                new.narrow(axis, 0, S).copy_(old.narrow(axis, 0, S))
                # a mask hides a number but not a NaN (0 × NaN = NaN), so no slot stays unwritten
                new.narrow(axis, S, capacity - S).zero_()
                self.columns[name] = new

    def check(self, new: Mapping[str, Tensor]) -> None:
        """New tokens bring one tensor for each column but `valid`, of the right shape."""
        keys, values, key_int = self.shapes
        shapes = {
            "keys": (*keys[:2], None, *keys[3:]),
            "values": (*values[:2], None, *values[3:]),
            "key_int": (key_int[0], None, key_int[1]),
            "token": (self.rows, None),
            **{name: (self.rows, None, *shape) for name, shape in self.extra.items()},
        }
        check_columns(new, shapes)

    def prepare(self, mask: Tensor | None, room: int = 1) -> tuple[Places, Tensor | None]:
        mask = self._pack_with(mask)
        self.reserve(self.width + room)
        if self._places is None:
            self._places = self._find_places()
        self._places.kept[:] = self.kept
        return self._places, mask

    def prepare_on_device(
        self, mask: Tensor | None, room: int = 1
    ) -> tuple[DevicePlaces, Tensor | None]:
        places, mask = self.prepare(mask, room)
        return DevicePlaces.of(places), mask

    def finish(self) -> None:
        assert self._places is not None
        kept = torch.from_numpy(self._places.kept)
        self.longest, width = int(kept.max()) if len(kept) else 0, self.width
        self.width = self.longest
        slot = torch.arange(max(width, self.width))
        torch.lt(slot, kept[:, None], out=self.valid[:, : len(slot)])
        self.consolidate()

    def _pack_with(self, mask: Tensor | None) -> Tensor | None:
        """Pack; a mask over the slots is packed with them, as one more column."""
        if mask is None or self.packed:
            self.pack()
            return mask
        self.columns["mask"] = self.valid.new_zeros(self.valid.shape)
        self.columns["mask"][:, : self.width] = mask
        self.pack()
        return self.columns.pop("mask")[:, : self.width]

    def _find_places(self) -> Places:
        where = np.zeros((self.rows, len(PLACES)), np.int64)
        widths = np.zeros((len(PLACES) - 1, 2), np.int64)
        for c, name in enumerate(PLACES[:-1]):
            if name in self.columns:
                column = self.columns[name]
                row_nbytes = column.stride(0) * column.element_size()
                where[:, c] = column.data_ptr() + np.arange(self.rows) * row_nbytes
                heads = column.shape[1] if name in HEAD_MAJOR else 1
                widths[c] = heads, self._row_nbytes(name) // heads
        where[:, -1] = self.capacity
        kept = np.zeros(self.rows, np.int64)
        dtypes = self.keys.dtype, self.key_int.dtype
        return Places(where, kept, *dtypes, widths, self.slot_nbytes)

    def __getstate__(self) -> dict[str, object]:
        # a copy lies elsewhere
        return self.__dict__ | {"_places": None}

    def _row_nbytes(self, name: str) -> int:
        shape = self.columns[name].shape
        per_slot = shape[1:2] + shape[3:] if name in HEAD_MAJOR else shape[2:]
        return math.prod(per_slot) * self.columns[name].element_size()


def check_columns(new: Mapping[str, Tensor], shapes: Mapping[str, tuple[int | None, ...]]) -> None:
    """Raise unless `new` has a tensor of the right shape for each name; None: as many as tokens."""
    if missing := shapes.keys() ^ new.keys():
        raise PruneError(
            f"push and the table differ in the columns {sorted(missing)}; pass a tensor for "
            f"each of {sorted(shapes)}"
        )
    T = new["token"].shape[1]
    for name, shape in shapes.items():
        want = tuple(T if size is None else size for size in shape)
        if new[name].shape != want:
            raise PruneError(
                f"{name} has the shape {tuple(new[name].shape)}; this table needs {want}"
            )
