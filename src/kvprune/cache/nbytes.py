"""The size of any cache."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import Cache

from kvprune.cache.pruned_cache import PrunedCache


def nbytes(cache: Cache) -> int:
    """Bytes of all storage of a cache: a PrunedCache, or one of transformers' own."""
    if isinstance(cache, PrunedCache):
        return cache.nbytes
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(state.untyped_storage().nbytes() for state in states if isinstance(state, Tensor))
