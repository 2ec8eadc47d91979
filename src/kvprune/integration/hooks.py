"""What makes plain `model.generate(...)` prune: the right cache, put in at the right moment."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn
from transformers.cache_utils import DynamicCache

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned

# methods of the model that are ours while attached
PREPARE, BATCH = "_prepare_cache_for_generation", "generate_batch"


class Generation:
    """Hooks on the whole model; methods, not closures, so that a copied model has its own."""

    def __init__(self, pruned: Pruned):
        self.pruned = pruned
        model = pruned.model
        self.names = list(inspect.signature(type(model).forward).parameters)[1:]
        self.hook = model.register_forward_pre_hook(self.before_forward, with_kwargs=True)
        setattr(model, PREPARE, self.prepare)
        setattr(model, BATCH, self.refuse)

    def remove(self) -> None:
        self.hook.remove()
        for name in (PREPARE, BATCH):
            vars(self.pruned.model).pop(name, None)

    def prepare(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """In place of the host's own: an empty pruned cache, unless the user brought one."""
        wanted = generation_config.cache_implementation
        if wanted not in (None, "dynamic"):
            raise PruneError(
                f"cache_implementation={wanted!r} cannot be pruned; leave it out, or detach first"
            )
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            model_kwargs["past_key_values"] = self.fitting(cache)
        elif generation_config.use_cache is not False:
            self.check_mode()
            cache = PrunedCache(self.pruned)
            if generation_config.is_assistant:
                cache.activate_past_recording()
            model_kwargs["past_key_values"] = cache

    def before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook: a model that would make or was given an empty cache gets ours."""
        kwargs = {**dict(zip(self.names, args, strict=False)), **kwargs}
        cache = kwargs.get("past_key_values")
        if not self.pruned.drops:
            if isinstance(cache, PrunedCache):
                self.check_mode()
            return None
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self.pruned.model.config.get_text_config(), "use_cache", False)
        if cache is not None:
            kwargs["past_key_values"] = self.fitting(cache)
        elif use_cache and not model.training:
            kwargs["past_key_values"] = PrunedCache(self.pruned)
        return (), kwargs

    def fitting(self, cache: Any) -> Any:
        """The cache itself if it is ours, a new one for an empty dynamic one, else an error."""
        if isinstance(cache, PrunedCache):
            if cache.pruned_indices != [site.index for site in self.pruned.sites]:
                raise PruneError("this PrunedCache was made for another model; make one for this")
            return cache
        if type(cache) is DynamicCache and not cache.offloading and not cache.get_seq_length():
            return PrunedCache(self.pruned)
        raise PruneError(
            f"a {type(cache).__name__} with {cache.get_seq_length()} tokens cannot be pruned; "
            f"pass none, or kvprune.PrunedCache(pruned)"
        )

    def check_mode(self) -> None:
        if not self.pruned.drops:
            raise PruneError(
                "a pruned cache drops tokens for good, but the gate is soft now; "
                "call model.eval() and leave pruned.hard at None"
            )

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Continuous batching keeps a paged cache of its own and would ignore pruning."""
        raise PruneError("generate_batch cannot prune; call generate with a padded batch")
