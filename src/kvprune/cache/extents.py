"""ExtentTable: every row of a layer in an extent of its own, as long as its survivors need."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvprune.cache.arena import Arena
from kvprune.cache.chunk import Extent
from kvprune.cache.layout import STEP, Layout, by_slot, copy_slots
from kvprune.cache.lengths import Lengths
from kvprune.cache.slots import check_columns
from kvprune.errors import BudgetError, PruneError
from kvprune.ops.decode import REMOVE
from kvprune.ops.decode.table import (
    HEAD_MAJOR,
    PLACES,
    DevicePlaces,
    Members,
    Places,
    Slots,
    join_columns,
    split_columns,
)
from kvprune.ops.hadamard import hadamard
from kvprune.ops.int8 import dequantise, quantise

if TYPE_CHECKING:
    from kvprune.ops.jit import Array

# a row that fills less than this of its extent moves to a smaller one
MIN_USE = 0.85


def tight(slots: int) -> int:
    """The smallest capacity for this many slots."""
    return -(-slots // STEP) * STEP


def roomy(slots: int) -> int:
    """A capacity with a sixteenth to spare: a move is then paid for by the tokens before it."""
    return tight(slots + slots // 16)


def most_slots(slots: int) -> int:
    """The largest capacity that a row with this many tokens may have."""
    return int((slots + slots // 16 + STEP) / MIN_USE)


class ExtentTable:
    """A batch of rows, each a dense prefix of its own extent; it has the interface of `SlotTable`.

    A dropped token's slot goes to the row's last token. A row that is full moves to a larger
    extent, one that has become much too roomy to a smaller one, and no other row is touched: rows
    are added, left out and copied at the cost of their own tokens. What rows leave behind is closed
    when the others next change.
    """

    packed = True
    for_kernels = True

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
        arena: Arena | None = None,
        kv: str | None = None,
        key_int: str | None = None,
        rotate: bool = True,
    ) -> None:
        value_dim = head_dim if value_dim is None else value_dim
        self.layout = Layout(heads, head_dim, value_dim, rank, extra or {}, dtype, kv, key_int)
        self.arena = Arena(device, shared=False) if arena is None else arena
        self.stored = torch.empty(0, dtype=self.layout.stored, device=self.arena.device)
        self.rotation = None
        if rotate and self.layout.scaled:
            self.rotation = hadamard(head_dim, self.arena.device)
        self._widths = np.array(self.layout.widths, dtype=np.int64)
        self._extents: list[Extent | None] = []
        self._where = np.zeros((0, len(PLACES)), np.int64)
        # no row has more tokens; exact unless a GPU's kernels are at work
        self._most = np.zeros(0, np.int64)
        self._lengths: Lengths | None = None
        self._moved = False  # whether `_where` has changed
        # whether kernels run beside the host, which then must not wait for them
        self.apart = self.arena.device.type != "cpu"
        # in an arena that others share, what this table holds must go back when it dies
        weakref.finalize(self, _give_back, self.arena, self._extents)
        self.add_rows(rows)

    @property
    def _kept(self) -> Array:
        """Tokens of each row: (B,). The host may change them, and waits until it knows them."""
        if self._lengths is not None:
            self._lengths.wait()
            self._lengths = None
        return self._most

    @_kept.setter
    def _kept(self, kept: Array) -> None:
        self._most = kept

    @property
    def rows(self) -> int:
        return len(self._most)

    @property
    def width(self) -> int:
        return int(self._kept.max(initial=0))

    longest = width

    @property
    def kept(self) -> Tensor:
        if self._lengths is not None:
            return self._lengths.kept.clone()
        return torch.tensor(self._kept, device=self.stored.device)

    @property
    def capacity(self) -> Tensor:
        """Slots of each row's extent: (B,)."""
        return torch.tensor(self._where[:, -1])

    @property
    def extra(self) -> Mapping[str, tuple[int, ...]]:
        return self.layout.extra

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        B, layout = self.rows, self.layout
        heads = (B, layout.heads, 1)
        return (*heads, layout.key_dim), (*heads, layout.value_dim), (B, layout.rank)

    @property
    def load_factor(self) -> float:
        """Slots in use / slots that there are."""
        capacity = int(self._where[:, -1].sum())
        return int(self._kept.sum()) / capacity if capacity else 1.0

    @property
    def nbytes(self) -> int:
        """Bytes of its extents."""
        return sum(extent.size for extent in self._extents if extent is not None)

    def row_nbytes(self) -> Array:
        """Bytes of each row's extent: (B,)."""
        return np.asarray(self._where[:, -1] * self.layout.slot_nbytes)

    def growth(self) -> Array:
        """Bytes that one more token takes in each row: (B,); 0 where there is room."""
        full = self._kept >= self._where[:, -1]
        slots = self._kept + 1
        roomy = -(-(slots + slots // 16) // STEP) * STEP
        return np.where(full, (roomy - self._where[:, -1]) * self.layout.slot_nbytes, 0)

    @property
    def slot_nbytes(self) -> int:
        return self.layout.slot_nbytes

    @property
    def dense_nbytes(self) -> int:
        """Bytes of one token's key and value in a dense cache."""
        return self.layout.dense_nbytes

    def offsets(self) -> list[tuple[int, int] | None]:
        """Where each row is: the address of its chunk, and the offset in it."""
        return [None if e is None else (e.chunk.address, e.offset) for e in self._extents]

    def get(self) -> Slots:
        """Copies: rows that lie apart are put side by side, free slots are zero."""
        B, S, layout = self.rows, self.width, self.layout
        dtype, device = layout.dtype, self.stored.device
        keys = torch.zeros(B, layout.heads, S, layout.key_dim, dtype=dtype, device=device)
        values = torch.zeros(B, layout.heads, S, layout.value_dim, dtype=dtype, device=device)
        key_int = torch.zeros(B, S, layout.rank, device=device)
        for b in range(B):
            n, row = int(self._kept[b]), self.row(b)
            if not n:
                continue
            keys[b, :, :n], values[b, :, :n] = self._heads(row)
            key_int[b, :n] = _interaction(row)
        return Slots(keys, values, key_int, *self.members())

    def members(self) -> Members:
        B, S, device = self.rows, self.width, self.stored.device
        token = torch.full((B, S), -1, device=device)
        for b in range(B):
            token[b, : int(self._kept[b])] = self.row(b)["token"]
        return Members(token, torch.arange(S, device=device) < self.kept[:, None])

    def column(self, name: str) -> Tensor:
        joined = torch.zeros(self.rows, self.width, self.layout.sections["extra"].width or 0)
        for b in range(self.rows):
            joined[b, : int(self._kept[b])] = self.row(b)["extra"]
        return split_columns(joined.to(self.stored.device), self.extra)[name]

    def set_column(self, name: str, values: Tensor) -> None:
        for b in range(self.rows):
            column = split_columns(self.row(b)["extra"], self.extra)[name]
            column.copy_(values[b, : len(column)])

    def row(self, b: int) -> dict[str, Tensor]:
        """Views of one row's tokens, by column, as they are stored: slots first."""
        extent, n = self._extents[b], int(self._kept[b])
        memory = self.stored.view(torch.uint8) if extent is None else extent.bytes
        views = self.layout.views(memory, int(self._where[b, -1]))
        return {name: by_slot(name, column)[:n] for name, column in views.items()}

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
        """Append each row's new tokens; where `valid` is False, none."""
        B, T = token.shape  # key: (B, H, T, D), value: (B, H, T, Dv), key_int: (B, T, R)
        key_int = key.new_empty(B, T, 0) if key_int is None else key_int
        new = {"keys": key, "values": value, "key_int": key_int, "token": token}
        self.check({**new, **extra})
        if T == 0:
            return
        count = np.full(B, T) if valid is None else valid.sum(1).cpu().numpy()
        self._reserve(self._kept + count, tight if T > 1 else roomy)
        new["extra"] = join_columns(extra, token)
        for b in np.flatnonzero(count):
            keep = slice(None) if valid is None or count[b] == T else valid[b].nonzero()[:, 0]
            self._append(int(b), {
                name: x[b].transpose(0, 1)[keep] if name in HEAD_MAJOR else x[b, keep]
                for name, x in new.items()
            })  # fmt: skip
        self.arena.settle()

    def remove(self, mask: Tensor) -> None:
        """Free the slots where `mask` (B, S), shaped like `get().valid`, is True."""
        REMOVE.implementation(self.stored)(self, mask)

    def release(self, rows: Tensor) -> None:
        """Empty entire rows, by index or by mask; the batch keeps its shape."""
        for b in torch.arange(self.rows)[rows.cpu()].tolist():
            self._kept[b] = 0
            self._move(b, 0)

    def add_rows(self, count: int) -> None:
        """More rows at the end, empty."""
        self._extents += [None] * count
        self._where = np.concatenate([self._where, np.zeros((count, len(PLACES)), np.int64)])
        self._kept = np.concatenate([self._kept, np.zeros(count, np.int64)])

    def take_over(self, other: ExtentTable) -> None:
        """All rows of a table in the same arena, where they lie; it is empty afterwards."""
        if other.arena is not self.arena or other.layout.form != self.layout.form:
            raise PruneError("rows can be taken over from a table of the same arena and layout")
        for extent in other._extents:
            if extent is not None:
                extent.owner = weakref.ref(self)
        self._extents += other._extents
        self._where = np.concatenate([self._where, other._where])
        self._kept = np.concatenate([self._kept, other._kept])
        other._extents.clear()
        other._where, other._kept = other._where[:0], other._kept[:0]

    def put(self, b: int, columns: Mapping[str, Tensor]) -> None:
        """Fill an empty row with what `row` gave, of this table or of one with the same layout."""
        if self._kept[b]:
            raise PruneError(f"row {b} holds {self._kept[b]} tokens; release it first")
        count = np.zeros(self.rows, np.int64)
        count[b] = len(columns["token"])
        self._reserve(count, tight)
        self._kept[b] = count[b]
        for name, column in self.row(b).items():
            column.copy_(columns[name])

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row `rows[i]` was: reorders, repeats or leaves out rows (beams).

        The first to ask for a row takes its extent; the others get copies. Copies are made before
        anything changes, so that a budget that refuses them costs nothing.
        """
        wanted: list[int] = rows.tolist()
        # known before copies are made: how long they are follows from it
        kept = self._kept
        takes = {b: i for i, b in reversed(list(enumerate(wanted)))}
        copies: dict[int, Extent | None] = {}
        try:
            for i, b in enumerate(wanted):
                if takes[b] != i:
                    copies[i] = self._copy(b)
        except PruneError:
            _give_back(self.arena, copies.values())
            raise
        _give_back(self.arena, [e for b, e in enumerate(self._extents) if b not in takes])
        old = self._extents.copy()
        self._extents[:] = [copies[i] if i in copies else old[b] for i, b in enumerate(wanted)]
        self._where, self._kept = self._where[wanted], kept[wanted]
        for i in copies:
            self._locate(i, roomy(int(self._kept[i])))

    def repeat(self, times: int) -> None:
        """Every row `times` times, copies side by side, like `repeat_interleave`."""
        self.select(torch.arange(self.rows).repeat_interleave(times))

    def pack(self) -> None:
        """Rows are always dense."""

    def check(self, new: Mapping[str, Tensor]) -> None:
        """New tokens bring one tensor for each column, of the right shape."""
        B, layout = self.rows, self.layout
        shapes = {
            "keys": (B, layout.heads, None, layout.key_dim),
            "values": (B, layout.heads, None, layout.value_dim),
            "key_int": (B, None, layout.rank),
            "token": (B, None),
            **{name: (B, None, *shape) for name, shape in self.extra.items()},
        }
        check_columns(new, shapes)

    def prepare(self, mask: Tensor | None, room: int = 1) -> tuple[Places, Tensor | None]:
        if room:
            self.reserve(room)
        layout = self.layout
        places = Places(
            self._where, self._kept, layout.stored, layout.int_stored, self._widths,
            layout.slot_nbytes, self.rotation,
        )  # fmt: skip
        return places, mask

    def prepare_on_device(
        self, mask: Tensor | None, room: int = 1
    ) -> tuple[DevicePlaces, Tensor | None]:
        if not self.apart:
            places, mask = self.prepare(mask, room)
            return DevicePlaces.of(places, self.layout.align), mask
        if self._lengths is None:
            self._lengths = Lengths(self._most, self._where, self.arena.device)
        lengths, layout = self._lengths, self.layout
        lengths.catch_up()
        self._shrink()
        self.reserve(room)
        if self._moved:
            lengths.locate(self._where)
            self._moved = False
        most = int(self._most.max(initial=0))
        lengths.step(room)
        return DevicePlaces(
            lengths.where, lengths.kept, most, layout.stored, layout.int_stored, self._widths,
            self.rotation, layout.align,
        ), mask  # fmt: skip

    def reserve(self, room: int = 1) -> None:
        """Make room for this many more tokens in every row."""
        lengths = self._lengths
        try:
            if lengths is not None:
                lengths.catch_up()
            self._reserve(self._most + room, roomy)
        except BudgetError:
            if lengths is None or not lengths.behind:
                raise
            # the host counts tokens that may have left: before it refuses anything it must know
            lengths.wait()
            self._reserve(self._most + room, roomy)

    def finish(self) -> None:
        # rows whose kernel is still at work are looked after before the next one
        if self._lengths is None:
            self._shrink()

    def _shrink(self) -> None:
        """Give back what is far too much: rows that have lost many tokens move."""
        enough = self._most + (self._most >> 4) + STEP
        for b in np.flatnonzero(enough < MIN_USE * self._where[:, -1]).tolist():
            try:
                self._move(b, roomy(int(self._most[b])))
            except BudgetError:
                # there is no room for both copies: the row stays roomy until there is
                break
        self.arena.settle()

    def copy_to(self, arena: Arena) -> ExtentTable:
        """A copy in another arena, perhaps on another device."""
        # first: what is copied must be known
        assert len(self._kept) == self.rows
        new = copy.copy(self)
        new.arena, new.stored = arena, self.stored.to(arena.device)
        new.rotation = None if self.rotation is None else self.rotation.to(arena.device)
        new.apart = self.apart if arena.device == self.arena.device else arena.device.type != "cpu"
        new._extents = [None] * self.rows
        new._where, new._kept = np.zeros_like(self._where), np.zeros_like(self._kept)
        weakref.finalize(new, _give_back, arena, new._extents)
        for b in range(self.rows):
            new.put(b, self.row(b))
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> ExtentTable:
        return self.copy_to(copy.deepcopy(self.arena, memo))

    def clone(self) -> ExtentTable:
        return copy.deepcopy(self)

    def moved(self, extent: Extent) -> None:
        """Called by the arena."""
        for b, own in enumerate(self._extents):
            if own is extent:
                self._locate(b, int(self._where[b, -1]))

    def _reserve(self, slots: Array, capacity: Callable[[int], int]) -> None:
        """Make room for this many slots in each row: (B,)."""
        rows = np.flatnonzero(slots > self._where[:, -1]).tolist()
        if not rows:
            return
        new = {b: capacity(int(slots[b])) for b in rows}
        more = sum(self.layout.nbytes(new[b]) - self._nbytes(b) for b in rows)
        self.arena.refuse(more)
        for b in rows:
            self._move(b, new[b])

    def _move(self, b: int, capacity: int) -> None:
        """Give a row another extent, of this capacity."""
        extent = self._copy(b, capacity)
        old, self._extents[b] = self._extents[b], extent
        self._locate(b, capacity)
        _give_back(self.arena, [old])

    def _copy(self, b: int, capacity: int | None = None) -> Extent | None:
        """A new extent with a row's tokens, and room for a sixteenth more."""
        capacity = roomy(int(self._most[b])) if capacity is None else capacity
        if not capacity:
            return None
        extent = self.arena.take(self.layout.nbytes(capacity), self)
        old = self._extents[b]  # after `take`, which may have moved the row
        if old is not None:
            source = old.bytes, int(self._where[b, -1])
            copy_slots(self.layout, source, (extent.bytes, capacity), int(self._most[b]))
        return extent

    def _locate(self, b: int, capacity: int) -> None:
        extent = self._extents[b]
        self._where[b] = 0 if extent is None else self.layout.places(extent.address, capacity)
        self._moved = True

    def _nbytes(self, b: int) -> int:
        extent = self._extents[b]
        return 0 if extent is None else extent.size

    def _append(self, b: int, new: Mapping[str, Tensor]) -> None:
        """Store tokens (T, ...) after the row's last one, in the form that the layout has."""
        old, T = int(self._kept[b]), len(new["token"])
        self._kept[b] += T
        free = {name: column[old:] for name, column in self.row(b).items()}
        for name in ("keys", "values", "key_int"):
            numbers, scale = new[name], name.removesuffix("s") + "_scale"
            if scale in free:
                if name == "keys" and self.rotation is not None:
                    numbers = numbers.float() @ self.rotation
                numbers, scales = quantise(numbers)
                free[scale].copy_(scales)
            free[name].copy_(numbers)
        free["token"].copy_(new["token"])
        free["extra"].copy_(new["extra"])

    def _heads(self, row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A row's keys and values as they came in: (H, n, D), (H, n, Dv)."""
        keys, values = row["keys"], row["values"]
        if self.layout.scaled:
            keys = dequantise(keys, row["key_scale"], torch.float32)
            keys = keys if self.rotation is None else keys @ self.rotation
            values = dequantise(values, row["value_scale"], self.layout.dtype)
        return keys.transpose(0, 1), values.transpose(0, 1)


def _interaction(row: Mapping[str, Tensor]) -> Tensor:
    """A row's interaction keys as float32: (n, R)."""
    key_int = row["key_int"]
    if "key_int_scale" in row:
        return dequantise(key_int, row["key_int_scale"], torch.float32)
    return key_int.float()


def _give_back(arena: Arena, extents: Iterable[Extent | None]) -> None:
    for extent in extents:
        if extent is not None:
            arena.give(extent)
