"""The caches of a model, pruned or dense: new ones, and those that go on from a snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache
from transformers.cache_utils import Cache

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.cache.rows import fill_dense, take_dense_snapshot
from kvprune.cache.snapshot import Snapshot
from kvprune.errors import PruneError
from kvprune.integration.fingerprint import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvprune.integration.handle import Pruned


class Caches:
    """`options` are those of a PrunedCache (kv, budget), None where it is to choose."""

    def __init__(self, model: PreTrainedModel, pruned: Pruned | None, **options: Any):
        self.model, self.pruned = model, pruned
        self.options = {name: value for name, value in options.items() if value is not None}
        if pruned is None and self.options:
            raise PruneError(
                f"the model is dense: there is no {next(iter(self.options))} to set; load an "
                f"adapter with --adapter"
            )
        self.new()  # what the options have wrong is said at once

    def new(self) -> Cache:
        if self.pruned is None:
            return DynamicCache(config=self.model.config)
        return PrunedCache(self.pruned, record=True, **self.options)

    def snapshot(self, cache: Cache | None, notes: Mapping[str, Any]) -> Snapshot:
        """The only row of a cache; of one that has read nothing, no more than whose it would be."""
        cache = self.new() if cache is None else cache
        if not cache.get_seq_length():
            return Snapshot(0, (), (), self._fingerprint(cache), notes)
        if isinstance(cache, PrunedCache):
            return cache.snapshot(0, **notes)
        return take_dense_snapshot(cache, self._fingerprint(cache), notes)

    def restore(self, snapshot: Snapshot, rows: int = 1) -> Cache:
        """A cache with this many rows that are all as the snapshot was."""
        self._check_kind(snapshot)
        cache = self.new()
        snapshot.check(self._fingerprint(cache))
        if not snapshot.tokens:
            return cache
        try:
            if isinstance(cache, PrunedCache):
                cache.join(*[snapshot] * rows)
            else:
                fill_dense(cache, snapshot, rows, self.model.device)
        except PruneError:
            raise
        except (IndexError, KeyError, RuntimeError, ValueError) as error:
            raise PruneError(f"the snapshot is damaged: {error}; read its text again") from error
        return cache

    def _fingerprint(self, cache: Cache) -> dict[str, Any]:
        return cache.fingerprint() if isinstance(cache, PrunedCache) else fingerprint(self.model)

    def _check_kind(self, snapshot: Snapshot) -> None:
        was_pruned, is_pruned = "adapter" in snapshot.fingerprint, self.pruned is not None
        if was_pruned != is_pruned:
            kinds = ("a dense", "a pruned")
            raise PruneError(
                f"the snapshot is of {kinds[was_pruned]} model, but this is {kinds[is_pruned]} "
                f"one; load what it was made with"
            )
