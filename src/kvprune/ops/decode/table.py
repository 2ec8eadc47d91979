"""What the decode step needs of the table that stores a layer's tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvprune.ops.jit import Array

# columns with a head before the slot
HEAD_MAJOR = ("keys", "values", "key_scale", "value_scale")
# what `Places.where` says of a row, in this order: addresses, and the capacity in slots
PLACES = (
    "keys", "values", "key_scale", "value_scale", "key_int", "key_int_scale", "extra", "token",
    "capacity",
)  # fmt: skip


class Slots(NamedTuple):
    """The first S slots of every row, valid until the table changes."""

    keys: Tensor  # (B, H, S, D)
    values: Tensor  # (B, H, S, Dv)
    key_int: Tensor  # (B, S, R)
    token: Tensor  # (B, S), the number of the token in the slot
    valid: Tensor  # (B, S), False where the slot is free


class Members(NamedTuple):
    """Who is in a table: `Slots` without keys and values."""

    token: Tensor  # (B, S)
    valid: Tensor  # (B, S)


class Places(NamedTuple):
    """Where kernels find the rows, each a dense prefix of its slots."""

    where: Array  # (B, 9) int64, see `PLACES`
    kept: Array  # (B,) int64, tokens of each row; a kernel that changes them writes it
    stored: torch.dtype  # of keys and values
    int_stored: torch.dtype  # of interaction keys
    widths: Array  # (8, 2) int64: heads, and bytes per slot and head, of each column
    slot_nbytes: int  # of one slot, all columns
    rotation: Tensor | None = None  # (D, D), what keys were multiplied by before they were stored


class DevicePlaces(NamedTuple):
    """`Places` for kernels of a GPU; what is a tensor lies there, and the host does not read it."""

    where: Tensor  # (B, 9) int64, see `PLACES`
    kept: Tensor  # (B,) int64, tokens of each row; a kernel that changes them writes it
    most: int  # no row has more
    stored: torch.dtype
    int_stored: torch.dtype
    widths: Array
    rotation: Tensor | None = None
    align: int = 1  # keys, values and interaction keys start at multiples of so many bytes

    @classmethod
    def of(cls, places: Places, align: int = 1) -> DevicePlaces:
        """The same memory, for kernels that run on the CPU: in Triton's interpreter."""
        where, kept = torch.from_numpy(places.where), torch.from_numpy(places.kept)
        most = int(places.kept.max(initial=0))
        return cls(where, kept, most, *places[2:5], places.rotation, align)


class Table(Protocol):
    """Rows of slots, each a token's key, value, interaction key and number."""

    @property
    def stored(self) -> Tensor:
        """An empty tensor of the keys' stored dtype, on their device."""

    @property
    def for_kernels(self) -> bool:
        """Whether kernels of its device can read it: it has `prepare`, or what GPUs need."""

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the key, value and interaction key of one new token per row."""

    @property
    def rows(self) -> int: ...

    @property
    def width(self) -> int:
        """The highest slot in use + 1, of all rows."""

    @property
    def kept(self) -> Tensor:
        """Tokens of each row: (B,)."""

    @property
    def extra(self) -> Mapping[str, tuple[int, ...]]:
        """The trailing shapes of the method's own columns, by name."""

    def get(self) -> Slots:
        """The slots up to `width`."""

    def members(self) -> Members:
        """Who is in them."""

    def column(self, name: str) -> Tensor:
        """One of the method's own columns, up to `width`: (B, S, ...)."""

    def set_column(self, name: str, values: Tensor) -> None: ...

    def push(
        self,
        key: Tensor,
        value: Tensor,
        key_int: Tensor | None,
        token: Tensor,
        valid: Tensor | None = None,
        **extra: Tensor,
    ) -> None:
        """Store new tokens (B, T, ...) in free slots; where `valid` is False, skip them."""

    def remove(self, mask: Tensor) -> None:
        """Free the slots where `mask` (B, S) is True."""

    def check(self, new: Mapping[str, Tensor]) -> None:
        """Raise PruneError unless new tokens bring the right tensor for every column."""

    def prepare(self, mask: Tensor | None, room: int = 1) -> tuple[Places, Tensor | None]:
        """Pack the rows and make room for `room` more tokens in each, for a kernel.

        A mask (B, S) over the slots is packed with them.
        """

    def prepare_on_device(
        self, mask: Tensor | None, room: int = 1
    ) -> tuple[DevicePlaces, Tensor | None]:
        """`prepare` for kernels of a GPU, without a wait for it."""

    def finish(self) -> None:
        """Tidy up after a kernel that has changed `kept` of the places."""


class Rows(Table, Protocol):
    """A table whose rows are dense."""

    def row(self, b: int) -> dict[str, Tensor]:
        """Views of one row's tokens, by column: slots first."""


def join_columns(columns: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """A method's own columns side by side: (B, T, all their numbers); like: (B, T)."""
    parts = [column.reshape(*like.shape, -1).float() for column in columns.values()]
    return torch.cat(parts, -1) if parts else torch.empty(*like.shape, 0, device=like.device)


def split_columns(joined: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """What `join_columns` joined, by name: views (..., *shape)."""
    parts = joined.split([math.prod(shape) for shape in shapes.values()], -1)
    return {
        name: part.unflatten(-1, shape) if shape else part[..., 0]
        for (name, shape), part in zip(shapes.items(), parts, strict=True)
    }
