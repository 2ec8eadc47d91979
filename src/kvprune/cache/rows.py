"""Rows of a cache come and go: out as snapshots, in from snapshots, none of the others touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvprune.cache.extents import ExtentTable, tight
from kvprune.cache.layer import PrunedLayer
from kvprune.cache.snapshot import Snapshot, State
from kvprune.errors import BudgetError, PruneError
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from kvprune.cache.pruned_cache import PrunedCache


def take_snapshot(
    cache: PrunedCache,
    row: int,
    notes: dict[str, Any],
    fingerprint: Mapping[str, Any] | None = None,
) -> Snapshot:
    """What the cache holds of a row, as copies; fingerprint: of the cache, if it is known."""
    rows = len(cache.tokens)
    if not 0 <= row < rows:
        raise PruneError(f"row {row} does not exist; the cache has {rows}")
    if any(store.held is not None for store in cache.stores):
        raise PruneError("cannot take a snapshot while tokens are held back; call crop first")
    tokens = int(cache.tokens[row])
    pads = cache.seen - tokens
    layers = tuple(_pruned_state(store, row, tokens) for store in cache.stores)
    others = tuple(_other_state(layer, row, pads) for layer in _others(cache))
    known = cache.fingerprint() if fingerprint is None else fingerprint
    return Snapshot(tokens, layers, others, known, notes)


def join(
    cache: PrunedCache,
    snapshots: Sequence[Snapshot],
    fingerprint: Mapping[str, Any] | None = None,
) -> list[int]:
    """Add a row for each snapshot, and return their numbers; all are checked before any goes in.

    fingerprint: of the cache, if it is known.
    """
    fingerprint = cache.fingerprint() if fingerprint is None else fingerprint
    recorded = cache.stores[0].record is not None
    for snapshot in snapshots:
        snapshot.check(fingerprint)
        if recorded and any("drop_step" not in state for state in snapshot.layers):
            raise PruneError(
                "the cache records what is dropped, but the snapshot was taken without a record; "
                "use PrunedCache(record=False)"
            )
    first = 0 if cache.stores[0].table is None else len(cache.tokens)
    before = cache.tokens.tolist() if first else []
    lengths = [*before, *(snapshot.tokens for snapshot in snapshots)]
    others = _others(cache)
    if others and len(set(lengths)) > 1:
        raise PruneError(
            f"rows that have read {sorted(set(lengths))} tokens cannot share a cache: the model "
            f"has layers that are not pruned, whose rows are all of one length"
        )
    if not snapshots:
        return []
    device = cache._model().device
    tables = [
        store.begin(*_no_heads(snapshots[0].layers[number], fingerprint["dtype"], device))
        for number, store in enumerate(cache.stores)
    ]
    # before anything changes: do they all fit?
    need: dict[int, int] = {}
    for number, table in enumerate(tables):
        if isinstance(table, ExtentTable):
            sizes = (len(snapshot.layers[number]["token"]) for snapshot in snapshots)
            more = sum(table.layout.nbytes(tight(n)) for n in sizes)
            need[id(table.arena)] = need.get(id(table.arena), 0) + more
            table.arena.refuse(need[id(table.arena)])
    try:
        for number, table in enumerate(tables):
            table.add_rows(len(snapshots))
            for i, snapshot in enumerate(snapshots):
                state = snapshot.layers[number]
                columns = {name: x for name, x in state.items() if name != "drop_step"}
                table.put(first + i, columns)
    except BudgetError:
        # they fit, but not between what is there
        for table in tables:
            table.select(torch.arange(first))
        raise
    for number, store in enumerate(cache.stores):
        store.seen = max(lengths)
        if store.record is not None:
            for snapshot in snapshots:
                store.record.add_row(snapshot.layers[number]["drop_step"].long())
    for number, layer in enumerate(others):
        _add_rows(layer, [snapshot.others[number] for snapshot in snapshots], max(lengths))
    cache.tokens = torch.tensor(lengths)
    return list(range(first, first + len(snapshots)))


def leave(cache: PrunedCache, rows: Sequence[int]) -> None:
    """Let rows go; those behind them move up."""
    gone = set(rows)
    if unknown := gone - set(range(len(cache.tokens))):
        raise PruneError(f"rows {sorted(unknown)} do not exist; there are {len(cache.tokens)}")
    stay = torch.tensor([b for b in range(len(cache.tokens)) if b not in gone], dtype=torch.long)
    cache.batch_select_indices(stay)
    if not _others(cache):  # whose rows keep their pads
        for store in cache.stores:
            store.seen = int(cache.tokens.max()) if len(stay) else 0


def take_over(cache: PrunedCache, other: PrunedCache) -> list[int]:
    """Add the rows of a cache in the same arena, where they lie, and return their numbers."""
    first = 0 if cache.stores[0].table is None else len(cache.tokens)
    lengths = [*(cache.tokens.tolist() if first else []), *other.tokens.tolist()]
    for store, source in zip(cache.stores, other.stores, strict=True):
        assert isinstance(source.table, ExtentTable)
        if store.table is None:
            key, value, _ = source.table.shapes
            form: Any = {"dtype": source.dtype, "device": source.device}
            shapes = ((0, H, 0, D) for _, H, _, D in (key, value))
            store.begin(*(torch.empty(shape, **form) for shape in shapes))
        assert isinstance(store.table, ExtentTable)
        store.table.take_over(source.table)
        store.seen = max(lengths)
        if store.record is not None and source.record is not None:
            for step in source.record.step:
                store.record.add_row(step)
    cache.tokens = torch.tensor(lengths)
    other.reset()
    return list(range(first, len(lengths)))


def take_dense_snapshot(
    cache: Cache, fingerprint: Mapping[str, Any], notes: Mapping[str, Any]
) -> Snapshot:
    """All that the cache of a dense model holds of its only row."""
    states = tuple(_other_state(layer, 0, 0) for layer in _others(cache))
    return Snapshot(cache.get_seq_length(), (), states, fingerprint, notes)


def fill_dense(cache: Cache, snapshot: Snapshot, rows: int, device: torch.device) -> None:
    """Give the empty cache of a dense model rows that are all as the snapshot was."""
    for layer, state in zip(_others(cache), snapshot.others, strict=True):
        own = {name: column.to(device) for name, column in state.items()}
        _add_rows(layer, [own] * rows, snapshot.tokens)


def _pruned_state(store: PrunedLayer, row: int, tokens: int) -> State:
    assert store.table is not None
    state = {name: column.clone() for name, column in store.table.row(row).items()}
    if store.record is not None:
        step = store.record.step[row, :tokens]
        state["drop_step"] = torch.nn.functional.pad(step, (0, tokens - len(step)), value=NEVER)
    return state


def _no_heads(state: State, dtype: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Keys and values of no row and no token, as attention would bring them to the layer."""
    shapes = (state[name].shape[1:] for name in ("keys", "values"))
    form: Any = {"dtype": getattr(torch, dtype), "device": device}
    key, value = (torch.empty(0, H, 0, D, **form) for H, D in shapes)
    return key, value


def _others(cache: Cache) -> list[DynamicLayer]:
    """The layers that are not pruned; all must be plain attention."""
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) and type(layer) is not PrunedLayer:
            raise PruneError(
                f"a layer keeps a {type(layer).__name__} in its cache, which has no rows that "
                f"could come and go; snapshots are for models with attention alone"
            )
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]


def _other_state(layer: DynamicLayer, row: int, pads: int) -> State:
    assert layer.keys is not None
    assert layer.values is not None
    # a window shows the last tokens only; its pads have left, or are the first ones of it
    seen = layer.get_seq_length()
    pads = max(pads - (seen - layer.keys.shape[2]), 0)
    return {
        "keys": layer.keys[row, :, pads:].clone(),
        "values": layer.values[row, :, pads:].clone(),
    }


def _add_rows(layer: DynamicLayer, states: Sequence[State], tokens: int) -> None:
    keys, values = (torch.stack([state[name] for state in states]) for name in ("keys", "values"))
    if not layer.is_initialized:
        layer.lazy_initialization(keys, values)
    elif layer.keys is not None and layer.values is not None and layer.keys.numel():
        keys, values = torch.cat([layer.keys, keys]), torch.cat([layer.values, values])
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens
