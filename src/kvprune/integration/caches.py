"""Which cache a call of an attached model works with: a pruned one or none, never another kind.

given                       the gate drops          the gate is soft (training)
nothing                     a new PrunedCache       none; use_cache=True is refused
a PrunedCache               that one                refused
an unused DynamicCache      becomes a PrunedCache   refused
anything else               refused                 refused
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicCache

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned

REMEDY = "pass kvprune.PrunedCache(pruned), or no cache: a pruned one is then created"


def of_call(pruned: Pruned, kwargs: dict[str, Any]) -> PrunedCache | None:
    """The cache of a forward pass: as given, or a new one where the model would make its own."""
    cache, wanted = kwargs.get("past_key_values"), kwargs.get("use_cache")
    if cache is not None:
        return fitting(pruned, cache)
    if wanted and not pruned.drops:
        check_gate(pruned)
    if wanted is None and not pruned.model.training and pruned.drops:
        wanted = getattr(pruned.model.config.get_text_config(), "use_cache", False)
    return PrunedCache(pruned) if wanted else None


def of_graph(pruned: Pruned, kwargs: dict[str, Any]) -> PrunedCache | None:
    """The cache of a pass that is being compiled: as given; none is made inside of a graph."""
    if torch.is_grad_enabled():
        raise PruneError(
            "a compiled model that drops tokens has no gradients; call it under torch.no_grad(), "
            "or without torch.compile"
        )
    cache = kwargs.get("past_key_values")
    if cache is not None and not isinstance(cache, PrunedCache):
        raise PruneError(f"{type(cache).__name__} cannot be pruned in a compiled model; {REMEDY}")
    return cache


def of_generate(pruned: Pruned, settings: Any, kwargs: dict[str, Any]) -> None:
    """Put the cache of `generate` into its keyword arguments; settings: its GenerationConfig."""
    kind = settings.cache_implementation
    if kind not in (None, "dynamic"):
        raise PruneError(
            f"cache_implementation={kind!r} cannot be pruned; leave it out (here and in "
            f"model.generation_config), or detach first"
        )
    cache = kwargs.get("past_key_values")
    if cache is not None:
        cache = fitting(pruned, cache)
        # as transformers marks it: the cache outlives the call
        cache._is_user_defined = True  # type: ignore[attr-defined]
    elif settings.use_cache is not False:
        check_gate(pruned)
        cache = PrunedCache(pruned)
        if settings.is_assistant:
            cache.activate_past_recording()
    if cache is not None:
        cache.is_compileable = settings.compile_config is not None
        if cache.is_compileable:
            # an explicit wish holds on any device; transformers would skip it on a CPU
            settings.compile_config._compile_all_devices = True
        kwargs["past_key_values"] = cache


def fitting(pruned: Pruned, cache: Any) -> PrunedCache:
    """The cache itself if it is ours or can become so, else an error."""
    kind = type(cache).__name__
    if not isinstance(cache, Cache):
        raise PruneError(f"past_key_values is of the type {kind}, which is no cache; {REMEDY}")
    check_gate(pruned)
    if isinstance(cache, PrunedCache):
        _check_made_for(pruned, cache)
        cache.check_whole()
        return cache
    if type(cache) is not DynamicCache:
        raise PruneError(f"{kind} cannot be pruned; {REMEDY}")
    if cache.offloading:
        raise PruneError(f"{kind} with offloading cannot be pruned; {REMEDY}")
    if any(getattr(layer, "is_initialized", False) for layer in cache.layers):
        raise PruneError(
            f"{kind} with {cache.get_seq_length()} tokens cannot be pruned: they were read without "
            f"a vote; read them again, and {REMEDY}"
        )
    return _become_pruned(pruned, cache)


def check_gate(pruned: Pruned) -> None:
    """A soft gate drops nothing for good, so that there is nothing to keep for later tokens."""
    if not pruned.drops:
        raise PruneError(
            "a cache needs votes that are final, but the gate is soft now; call model.eval() and "
            "leave pruned.hard at None, or pass use_cache=False and no cache"
        )


def _check_made_for(pruned: Pruned, cache: PrunedCache) -> None:
    store = cache.stores[0]
    made_for = cache.pruned_indices, store.rank, store.columns
    indices = [site.index for site in pruned.sites]
    if made_for != (indices, pruned.rank, dict(pruned.working.columns)):
        raise PruneError(
            "this PrunedCache was made for another model or another method: the pruned layers or "
            "what is stored with each token differ; create one with kvprune.PrunedCache(pruned)"
        )


def _become_pruned(pruned: Pruned, cache: DynamicCache) -> PrunedCache:
    """In place, as torch's lazy modules do: whoever created the cache goes on with this object.

    With another one in its place, a loop that passes its own cache again would pass an empty one,
    and the model would have forgotten the text.
    """
    vars(cache).clear()
    cache.__class__ = PrunedCache  # type: ignore[assignment]
    assert isinstance(cache, PrunedCache)
    PrunedCache.__init__(cache, pruned)
    return cache
