"""Hooks on an attached model: each call gets a forward pass, and generation gets our cache."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.integration import caches, host
from kvprune.integration.attention import HIDDEN, PASS
from kvprune.integration.forward_pass import ForwardPass, Outcome

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned

# methods of the model that are ours while attached
PREPARE, BATCH, SAVE = "_prepare_cache_for_generation", "generate_batch", "save_pretrained"


class Hooks:
    """Everything that is registered on the model, and its removal.

    Methods, not closures, so that a copied model has hooks of its own.
    """

    def __init__(self, pruned: Pruned):
        self.pruned = pruned
        self.latest: ForwardPass | None = None
        self.last: Outcome | None = None  # what the last pass left behind
        self.last_training: Outcome | None = None  # the same of the last pass in training mode
        model = pruned.model
        # some models call the parts of their base model directly, and users may call the base
        # model itself: whichever is called first begins the pass
        self.arguments = {
            module: _arguments(module) for module in dict.fromkeys([model, model.base_model])
        }
        self.handles: list[Any] = []
        for module in self.arguments:
            self.handles += [
                module.register_forward_pre_hook(self.begin, with_kwargs=True),
                module.register_forward_hook(self.end, with_kwargs=True, always_call=True),
            ]
        for site in pruned.sites:
            self.handles.append(
                site.module.register_forward_pre_hook(self.before_attention, with_kwargs=True)
            )
        setattr(model, PREPARE, self.prepare_cache)
        setattr(model, BATCH, self.refuse)
        setattr(model, SAVE, self.save_pretrained)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for name in (PREPARE, BATCH, SAVE):
            vars(self.pruned.model).pop(name, None)

    def begin(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Forward pre-hook of the model: a pass begins, with our cache where one is used."""
        if PASS in kwargs:
            return None
        names, takes_any = self.arguments[module]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
        _refuse_empty(kwargs)
        cache = caches.of_call(self.pruned, kwargs)
        if cache is not None:
            kwargs["past_key_values"] = cache
        elif takes_any or "use_cache" in names:
            # or the model would make one of its own, which no later call could continue from
            kwargs["use_cache"] = False
        self.latest = self.new_pass(cache)
        self.latest.begun_by = module
        if takes_any:
            kwargs[PASS] = self.latest
        return (), kwargs

    def before_attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Forward pre-hook of an attention module: its function is not given the hidden states.

        The pass arrives by itself, also when a checkpointed layer runs again; StableLM does not
        pass keyword arguments on, and gets the latest one.
        """
        # in place: the keyword arguments are those of this call alone
        kwargs[HIDDEN] = host.hidden_states(args, kwargs)
        if PASS not in kwargs:
            kwargs[PASS] = self.latest or self.new_pass(None)

    def end(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Forward hook of the model: the pass that began here is over."""
        run = kwargs.get(PASS, self.latest)
        if run is None or run.begun_by is not module:
            return
        run.begun_by = None
        if run.cache is not None:
            if output is None:
                run.cache.break_off(run.seen)
            elif run.cache.seen - run.seen > 1:
                run.cache.trim()
        outcome = run.close()
        if output is None:
            return  # an error is on its way
        if len(outcome.layers) < len(self.pruned.layers):
            self._check_attention()
        self.last = outcome
        if outcome.training:
            self.last_training = outcome

    def new_pass(self, cache: PrunedCache | None) -> ForwardPass:
        own, training = self.pruned, self.pruned.model.training
        return ForwardPass(own.working, own.alpha, own.drops, training, cache, own.observer)

    def _check_attention(self) -> None:
        for site in self.pruned.sites:
            name = site.module.config._attn_implementation  # type: ignore[union-attr]
            if not str(name).startswith("kvprune"):
                raise PruneError(
                    f"{site.name} did not use kvprune's attention: the model's attention "
                    f"implementation was set to {name!r} after attach. Detach first, or leave it "
                    f"unchanged"
                )

    def prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """In place of the model's own: an empty pruned cache, unless the user brought one."""
        caches.of_generate(self.pruned, generation_config, model_kwargs)

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Continuous batching keeps a paged cache of its own and would ignore pruning."""
        raise PruneError("generate_batch cannot prune; call generate with a padded batch")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """In place of the model's own, which would leave out what pruning needs."""
        self.pruned._save_pretrained(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a model starts with no memory of a forward pass; graphs cannot be copied
        return {**self.__dict__, "latest": None, "last": None, "last_training": None}


def _refuse_empty(kwargs: dict[str, Any]) -> None:
    for name in ("input_ids", "inputs_embeds"):
        given = kwargs.get(name)
        if given is not None and 0 in given.shape[:2]:
            raise PruneError(
                f"{name} has the shape {tuple(given.shape)}: there is no token to read; give the "
                f"model at least one per row"
            )


def _arguments(module: nn.Module) -> tuple[list[str], bool]:
    """The names of a module's arguments, and whether it takes any other keyword."""
    parameters = inspect.signature(type(module).forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return list(parameters)[1:], takes_any
