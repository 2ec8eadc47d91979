"""Hooks on an attached model: each call gets a forward pass, and generation gets our cache."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.integration import caches, host, reading
from kvprune.integration.attention import HIDDEN, PASS
from kvprune.integration.flat import FlatPass
from kvprune.integration.forward_pass import ForwardPass, Outcome
from kvprune.integration.operator import InGraph
from kvprune.utils.handles import new_handle

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned

# methods of the model that are ours while attached
PREPARE, BATCH, SAVE = "_prepare_cache_for_generation", "generate_batch", "save_pretrained"
READ = "_prefill"


class Hooks:
    """Everything that is registered on the model, and its removal.

    Methods, not closures, so that a copied model has hooks of its own.
    """

    def __init__(self, pruned: Pruned):
        self.pruned = pruned
        self._handle = new_handle(self)
        self.latest: ForwardPass | InGraph | FlatPass | None = None
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
        setattr(model, READ, self.read)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        for name in (PREPARE, BATCH, SAVE, READ):
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
        traced = torch.compiler.is_compiling() and self.pruned.drops
        cache = (caches.of_graph if traced else caches.of_call)(self.pruned, kwargs)
        if cache is not None:
            kwargs["past_key_values"] = cache
        elif takes_any or "use_cache" in names:
            # or the model would make one of its own, which no later call could continue from
            kwargs["use_cache"] = False
        if torch.compiler.is_compiling() and cache is None:
            _all_real(kwargs)
        if traced:
            self.latest = InGraph(self._handle, None if cache is None else cache._handle)
        else:
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
        if not isinstance(run, ForwardPass) or run.begun_by is not module:
            return
        run.begun_by = None
        if output is None:
            self.break_off(run)  # an error is on its way
        else:
            self.end_pass(run)

    def begin_pass(self, cache: PrunedCache | None) -> ForwardPass:
        """A pass of a compiled graph, which knew neither cache nor gate when it was traced."""
        return self.new_pass(None if cache is None else caches.fitting(self.pruned, cache))

    def break_off(self, run: ForwardPass) -> None:
        """The pass met an error."""
        if run.cache is not None:
            run.cache.break_off(run.seen)
        run.close()

    def end_pass(self, run: ForwardPass) -> None:
        """The pass is over."""
        if run.cache is not None and run.cache.seen - run.seen > 1:
            run.cache.trim()
        outcome = run.close()
        if len(outcome.layers) < len(self.pruned.layers):
            self._check_attention()
        self.last = outcome
        if outcome.training:
            self.last_training = outcome

    def new_pass(self, cache: PrunedCache | None) -> ForwardPass:
        own, training = self.pruned, self.pruned.model.training
        alpha: Any = own._alpha_in_graph if torch.compiler.is_compiling() else own.alpha
        return ForwardPass(own.working, alpha, own.drops, training, cache, own.observer)

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

    def read(
        self, ids: Tensor, settings: Any, kwargs: dict[str, Any], is_first_iteration: bool = True
    ) -> Any:
        """In place of the model's own: the prompts of `generate`."""
        plain = is_first_iteration and settings.prefill_chunk_size is None
        wants = settings.output_hidden_states or settings.output_attentions
        if plain and not wants and reading.can_group(self.pruned, ids, kwargs):
            return reading.read(self.pruned, ids, kwargs)
        model = self.pruned.model
        return getattr(type(model), READ)(model, ids, settings, kwargs, is_first_iteration)

    def refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Continuous batching keeps a paged cache of its own and would ignore pruning."""
        raise PruneError("generate_batch cannot prune; call generate with a padded batch")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """In place of the model's own, which would leave out what pruning needs."""
        self.pruned._save_pretrained(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # a copy of a model starts with no memory of a forward pass; graphs cannot be copied
        return {**self.__dict__, "latest": None, "last": None, "last_training": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._handle = new_handle(self)


def _refuse_empty(kwargs: dict[str, Any]) -> None:
    for name in ("input_ids", "inputs_embeds"):
        given = kwargs.get(name)
        if given is not None and 0 in given.shape[:2]:
            raise PruneError(
                f"{name} has the shape {tuple(given.shape)}: there is no token to read; give the "
                f"model at least one per row"
            )


def _all_real(kwargs: dict[str, Any]) -> None:
    """Without mask and positions: every token is real.

    In a graph transformers cannot look whether positions start anew, and would expect packed rows.
    """
    if kwargs.get("attention_mask") is None and kwargs.get("position_ids") is None:
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        given = embeds if ids is None else ids
        if given is not None:
            kwargs["attention_mask"] = given.new_ones(given.shape[:2], dtype=torch.long)


def _arguments(module: nn.Module) -> tuple[list[str], bool]:
    """The names of a module's arguments, and whether it takes any other keyword."""
    parameters = inspect.signature(type(module).forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return list(parameters)[1:], takes_any
