"""Runs steps: rows that read have a cache each, rows that decode share one; one forward for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvprune.cache.arena import Arena
from kvprune.cache.extents import ExtentTable
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.cache.rows import join, take_over, take_snapshot
from kvprune.cache.snapshot import Snapshot
from kvprune.errors import PruneError
from kvprune.integration.flat import Part, check_flat, flat_forward
from kvprune.methods.base import Method
from kvprune.serve.request import RequestError, Settings
from kvprune.serve.scheduler import Row

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned
    from kvprune.ops.jit import Array


class Kind(NamedTuple):
    """Rows of one kind share a batch."""

    settings: Settings = Settings()
    recorded: bool = False
    model: str = ""


class ServedRow(Row):
    """A row with what its cache must know."""

    kind: Kind = Kind()
    all_logits: bool = False  # those of the prompt too
    snapshot: Snapshot | None = None  # where it goes on from when it is admitted


@dataclass
class Group:
    """Rows that decode together: row i of the cache is `rows[i]`."""

    cache: PrunedCache
    rows: list[ServedRow] = field(default_factory=list)


class Runner:
    """The caches of all rows, in one arena. It is the scheduler's `Sizes`.

    `models`: those that share their weights, by name; the first runs the passes of all.
    """

    def __init__(self, models: Mapping[str, Pruned], budget: int, kv: str | None = None):
        self.pruned, self.models, self.kv = next(iter(models.values())), models, kv
        pruned = self.pruned
        check_flat(pruned)
        self.arena = Arena(pruned.device, budget)
        self.groups: dict[Kind, Group] = {}
        self.reading: dict[ServedRow, PrunedCache] = {}
        self._methods: dict[tuple[str, Settings], Method] = {}
        self._fingerprints: dict[Kind, Mapping[str, Any]] = {}
        self._known: dict[int, tuple[Array, Array]] = {}  # sizes, until something changes
        caches = {name: self._new_cache(Kind(model=name)) for name in models}
        # also compiles the kernels, if nobody has
        for token in (0, 1):
            ids = torch.full((1, 1), token, device=pruned.device)
            parts = [self._part(cache, ids, Kind(model=name)) for name, cache in caches.items()]
            flat_forward(pruned, parts, torch.arange(len(parts), device=pruned.device))
        self._slots = {
            name: [table.slot_nbytes for table in _tables(cache)] for name, cache in caches.items()
        }
        self._likes = {name: take_snapshot(cache, 0, {}, {}) for name, cache in caches.items()}
        self.dense_slot = sum(table.dense_nbytes for table in _tables(next(iter(caches.values()))))
        for cache in caches.values():
            cache.reset()

    @property
    def layers(self) -> int:
        return len(self.pruned.sites)

    def token_bytes(self, model: str) -> tuple[int, int]:
        """Bytes of a token in one layer, here and in a dense cache."""
        return self._slots[model][0], self.dense_slot // self.layers

    @property
    def bytes(self) -> int:
        return self.arena.held

    def method(self, model: str, settings: Settings) -> Method:
        """What a model drops under these settings."""
        if (model, settings) not in self._methods:
            given = {k: v for k, v in vars(settings).items() if v is not None}
            own = self.models[model].working
            if refused := sorted(set(given) - set(own.adjustable)):
                raise RequestError(
                    f"kvprune.{refused[0]} cannot be set: the model is served with the method "
                    f"{own.method!r}, which has no such setting",
                    param=f"kvprune.{refused[0]}",
                )
            try:
                self._methods[model, settings] = replace(own, **given)
            except PruneError as error:
                raise RequestError(str(error), param="kvprune") from error
        return self._methods[model, settings]

    def enter(self, row: ServedRow) -> None:
        """A row comes, or comes back from its snapshot."""
        cache = self._new_cache(row.kind)
        if row.snapshot is not None:
            join(cache, [row.snapshot], self.fingerprint(row.kind))
        row.done = 0 if row.snapshot is None else row.snapshot.tokens
        row.snapshot = None
        self.reading[row] = cache
        if row.left == 1 and row.done:
            self._join_group(row)

    def leave(self, row: ServedRow) -> None:
        """A row goes, and its memory with it."""
        if row in self.reading:
            self.reading.pop(row).reset()
            return
        group = self.groups[row.kind]
        index = group.rows.index(row)
        del group.rows[index]
        self._known.pop(id(group), None)
        if group.rows:
            group.cache.leave(index)
        else:
            group.cache.reset()

    def snapshot(self, row: ServedRow) -> Snapshot:
        """What the caches hold of a row, as copies."""
        cache, index = self._place(row)
        return take_snapshot(cache, index, {}, self.fingerprint(row.kind))

    def fits(self, kind: Kind, snapshot: Snapshot) -> bool:
        """Whether a snapshot from elsewhere has the form of one of this kind."""
        recorded = all("drop_step" in state for state in snapshot.layers)
        return snapshot.is_like(self._likes[kind.model]) and (recorded or not kind.recorded)

    @torch.inference_mode()
    def step(self, work: Mapping[ServedRow, int]) -> dict[ServedRow, Tensor]:
        """Read so many tokens of each row; logits (K, V) of rows that have caught up.

        K is 1, or the number of tokens read if a row wants all. If the memory does not suffice, all
        rows must be read again: see `reset`.
        """
        parts, order = self._parts(work)
        assert set(order) == set(work), "every row that decodes takes part in every step"
        asked, at, start = list[tuple[ServedRow, int]](), list[int](), 0
        for row in order:
            count = work[row]
            if row.all_logits:
                at += range(start, start + count)
                asked.append((row, count))
            elif count == row.left:
                at.append(start + count - 1)
                asked.append((row, 1))
            start += count
        logits = flat_forward(
            self.pruned, parts, torch.tensor(at, dtype=torch.long).to(self.pruned.device)
        )
        self._known.clear()
        for row in order:
            row.done += work[row]
        for row in [row for row in self.reading if row.left == 0]:
            self._join_group(row)
        return dict(
            zip((row for row, _ in asked), logits.split([k for _, k in asked]), strict=True)
        )

    def _parts(self, work: Mapping[ServedRow, int]) -> tuple[list[Part], list[ServedRow]]:
        """The parts of a pass and their rows; those of one model are side by side."""
        parts: list[Part] = []
        order: list[ServedRow] = []
        for model in self.models:
            for kind, group in self.groups.items():
                if group.rows and kind.model == model:
                    ids = torch.tensor([[row.tokens[row.done]] for row in group.rows])
                    parts.append(self._part(group.cache, ids, kind))
                    order += group.rows
            for row, cache in self.reading.items():
                if row in work and row.kind.model == model:
                    ids = torch.tensor([row.tokens[row.done : row.done + work[row]]])
                    parts.append(self._part(cache, ids, row.kind))
                    order.append(row)
        return parts, order

    def reset(self) -> list[ServedRow]:
        """Empty all caches; the rows that were in them must be read again."""
        rows = [*self.reading, *(row for group in self.groups.values() for row in group.rows)]
        for cache in [*self.reading.values(), *(group.cache for group in self.groups.values())]:
            cache.reset()
        self.reading.clear()
        self.groups.clear()
        self._known.clear()
        for row in rows:
            row.done = 0
        return rows

    def held(self, row: Row) -> int:
        assert isinstance(row, ServedRow)
        if row in self.reading:
            return sum(int(table.row_nbytes().sum()) for table in _tables(self.reading[row]))
        group = self.groups.get(row.kind)
        if group is not None and row in group.rows:
            return int(self._sizes(group)[0][group.rows.index(row)])
        return 0 if row.snapshot is None else row.snapshot.nbytes

    def need(self, row: Row, tokens: int) -> int:
        assert isinstance(row, ServedRow)
        group = self.groups.get(row.kind)
        if group is not None and row in group.rows:
            return int(self._sizes(group)[1][group.rows.index(row)])
        # a row that is full moves to an extent with a sixteenth to spare
        return (tokens + 4) * self.slot(row) + self.held(row) // 16

    def copies(self) -> int:
        caches = [*self.reading.values(), *(group.cache for group in self.groups.values())]
        tables = [table for cache in caches for table in _tables(cache)]
        return max((int(table.row_nbytes().max(initial=0)) for table in tables), default=0)

    def slot(self, row: Row) -> int:
        return sum(self._slots[row.model])

    def kept(self, row: ServedRow) -> list[int]:
        """Tokens that each layer holds of a row."""
        cache, index = self._place(row)
        return [int(kept) for kept in cache.kept[:, index]] if cache.seen else [0] * self.layers

    def kept_by_layer(self) -> list[int]:
        """Tokens that each layer holds, of all rows."""
        caches = [*self.reading.values(), *(group.cache for group in self.groups.values())]
        total = torch.zeros(self.layers, dtype=torch.long)
        for cache in caches:
            if cache.stores[0].table is not None:
                total += cache.kept.sum(1).cpu()
        return [int(kept) for kept in total]

    def drop_step(self, row: ServedRow) -> Tensor:
        """When each token of a recorded row was dropped: (L, tokens read)."""
        cache, index = self._place(row)
        return cache.drop_step[:, index, : row.done]

    def _part(self, cache: PrunedCache, ids: Tensor, kind: Kind) -> Part:
        method = self.method(kind.model, kind.settings)
        return Part(cache, ids.to(self.pruned.device), method, self.models[kind.model])

    def _place(self, row: ServedRow) -> tuple[PrunedCache, int]:
        if row in self.reading:
            return self.reading[row], 0
        group = self.groups[row.kind]
        return group.cache, group.rows.index(row)

    def _new_cache(self, kind: Kind) -> PrunedCache:
        pruned = self.models[kind.model]
        return PrunedCache(pruned, record=kind.recorded, kv=self.kv, arena=self.arena)

    def _join_group(self, row: ServedRow) -> None:
        if row.kind not in self.groups:
            self.groups[row.kind] = Group(self._new_cache(row.kind))
        group = self.groups[row.kind]
        take_over(group.cache, self.reading.pop(row))
        group.rows.append(row)
        self._known.pop(id(group), None)

    def fingerprint(self, kind: Kind) -> Mapping[str, Any]:
        """It does not change while a model is served, and takes milliseconds."""
        if kind not in self._fingerprints:
            own = dict(self._new_cache(kind).fingerprint())
            settings = self.method(kind.model, kind.settings).to_dict()
            own |= {f"method.{name}": value for name, value in settings.items()}
            self._fingerprints[kind] = own
        return self._fingerprints[kind]

    def _sizes(self, group: Group) -> tuple[Array, Array]:
        """Bytes that each row takes, and that it needs for one more token."""
        key = id(group)
        if key not in self._known:
            tables = _tables(group.cache)
            held: Array = np.sum([table.row_nbytes() for table in tables], 0)
            more: Array = np.sum([table.growth() for table in tables], 0)
            self._known[key] = held, more
        return self._known[key]


def _tables(cache: PrunedCache) -> list[ExtentTable]:
    tables = [store.table for store in cache.stores if store.table is not None]
    assert all(isinstance(table, ExtentTable) for table in tables)
    return tables  # type: ignore[return-value]
