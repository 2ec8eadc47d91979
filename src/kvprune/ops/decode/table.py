"""What the decode step needs of the table that stores a layer's tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class Slots(NamedTuple):
    """Views of the first S slots of every row, valid until the table changes."""

    keys: Tensor  # (B, H, S, D)
    values: Tensor  # (B, H, S, Dv)
    key_int: Tensor  # (B, S, R)
    token: Tensor  # (B, S), the number of the token in the slot
    valid: Tensor  # (B, S), False where the slot is free


class Table(Protocol):
    """Rows of slots, each a token's key, value, interaction key and number.

    `columns` holds the tensors of `Slots` and the extra ones, by name, at full capacity.
    """

    columns: dict[str, Tensor]
    width: int  # highest slot in use + 1
    longest: int  # tokens of the longest row

    @property
    def keys(self) -> Tensor: ...
    @property
    def values(self) -> Tensor: ...
    @property
    def key_int(self) -> Tensor: ...
    @property
    def token(self) -> Tensor: ...
    @property
    def valid(self) -> Tensor: ...
    @property
    def rows(self) -> int: ...

    @property
    def kept(self) -> Tensor:
        """Tokens of each row: (B,)."""

    @property
    def extra(self) -> Mapping[str, tuple[int, ...]]:
        """The trailing shapes of the extra columns."""

    @property
    def packed(self) -> bool:
        """Whether every row is a dense prefix of its slots."""

    def get(self) -> Slots:
        """The slots up to `width`."""

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

    def pack(self) -> None:
        """Make every row a dense prefix."""

    def reserve(self, slots: int) -> None:
        """Make room for this many slots."""

    def consolidate(self) -> None:
        """Pack, or release memory, where that pays."""

    def check(self, new: Mapping[str, Tensor]) -> None:
        """Raise PruneError unless new tokens bring the right tensor for every column."""
