"""Prefixes: rows that were read before, found again by their exact tokens.

A pruned row cannot be cut short: what later tokens dropped is gone. So a row is kept as it was at
chosen lengths, and a request goes on from the longest one that its tokens begin with.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvprune.cache.snapshot import Snapshot

# shorter ones are read again as fast
SHORTEST = 32
_PRIME, _MODULUS = 1_000_003, 2**61 - 1


@dataclass(eq=False)
class Prefix:
    tokens: tuple[int, ...]
    kind: Hashable  # only requests of the same kind may use it: settings, salt
    snapshot: Snapshot
    bytes: int
    pinned: bool = False
    hits: int = 0
    id: str = ""


class Prefixes:
    """Within a budget of bytes; the least recently used go first, pinned ones stay."""

    def __init__(self, budget: int):
        self.budget, self.bytes = budget, 0
        self._found: OrderedDict[tuple[Hashable, int, int], Prefix] = OrderedDict()
        self._lengths: dict[int, int] = {}  # how many prefixes have this length
        self._numbers = itertools.count()

    def all(self) -> list[Prefix]:
        return list(self._found.values())

    def find(self, tokens: Sequence[int], kind: Hashable) -> Prefix | None:
        """The longest one that the tokens begin with, and go on from by one at least."""
        prefix = self._search(tokens, kind)
        if prefix is not None:
            self._found.move_to_end(self._key(prefix.tokens, kind))
            prefix.hits += 1
        return prefix

    def _search(self, tokens: Sequence[int], kind: Hashable) -> Prefix | None:
        lengths = {n for n in self._lengths if n < len(tokens)}
        if not lengths:
            return None
        hashes = _hashes(tokens, lengths)
        for length in sorted(lengths, reverse=True):
            prefix = self._found.get((kind, length, hashes[length]))
            if prefix is not None and prefix.tokens == tuple(tokens[:length]):
                return prefix
        return None

    def longest(self, tokens: Sequence[int], kind: Hashable) -> int:
        """The length of the one that `find` would give, which is not used by this."""
        prefix = self._search(tokens, kind)
        return 0 if prefix is None else len(prefix.tokens)

    def wants(self, tokens: Sequence[int], kind: Hashable) -> bool:
        """Whether it would keep these: long enough, and not kept already."""
        length = len(tokens)
        if length < SHORTEST:
            return False
        return self._key(tokens, kind) not in self._found

    def add(
        self, tokens: Sequence[int], kind: Hashable, snapshot: Snapshot, pinned: bool = False
    ) -> Prefix | None:
        """Keep a row; None if there is no room for it even without those that may go."""
        key = self._key(tokens, kind)
        old = self._found.get(key)
        if old is not None:
            old.pinned |= pinned
            self._found.move_to_end(key)
            return old
        size = snapshot.nbytes
        fixed = sum(prefix.bytes for prefix in self._found.values() if prefix.pinned)
        if fixed + size > self.budget:
            return None
        prefix = Prefix(tuple(tokens), kind, snapshot, size, pinned)
        prefix.id = f"prefix-{next(self._numbers)}"
        self._found[key] = prefix
        self.bytes += size
        self._lengths[len(tokens)] = self._lengths.get(len(tokens), 0) + 1
        self.shrink(self.budget)
        return prefix

    def shrink(self, budget: int) -> None:
        """Let go of the least recently used until so many bytes are left, or only pinned ones."""
        for key, prefix in list(self._found.items()):
            if self.bytes <= budget:
                return
            if not prefix.pinned:
                self._forget(key)

    def remove(self, id: str) -> bool:
        """Forget one, pinned or not; False if it is not there."""
        for key, prefix in self._found.items():
            if prefix.id == id:
                self._forget(key)
                return True
        return False

    def _forget(self, key: tuple[Hashable, int, int]) -> None:
        prefix = self._found.pop(key)
        self.bytes -= prefix.bytes
        length = len(prefix.tokens)
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]

    def _key(self, tokens: Sequence[int], kind: Hashable) -> tuple[Hashable, int, int]:
        length = len(tokens)
        return kind, length, _hashes(tokens, {length})[length]


def _hashes(tokens: Sequence[int], lengths: set[int]) -> dict[int, int]:
    """A hash of the first n tokens, for each of these lengths: one walk for all."""
    found, value, last = {}, 0, max(lengths)
    for n, token in enumerate(itertools.islice(tokens, last), 1):
        value = (value * _PRIME + token + 1) % _MODULUS
        if n in lengths:
            found[n] = value
    return found
