"""Attach pruning to a model in place, and take it off again without a trace."""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kvprune.errors import PruneError
from kvprune.integration import attention, host
from kvprune.integration.fingerprint import fingerprint
from kvprune.integration.forward_pass import Observer, Outcome
from kvprune.integration.hooks import Hooks
from kvprune.integration.layer import Layer, layer_of
from kvprune.methods.base import Method
from kvprune.methods.dense import DenseConfig
from kvprune.methods.learned import PruningConfig, check_alpha
from kvprune.utils.modes import evaluating

log = logging.getLogger(__name__)


class Sparsity(NamedTuple):
    """The share of earlier tokens that were dropped, over all pairs j < k of real tokens."""

    total: float
    per_layer: Tensor  # (L,)

    def __float__(self) -> float:
        return self.total


def attach(model: PreTrainedModel, config: Method | None = None) -> Pruned:
    """Put pruning (or a baseline) into every full-attention layer of the model, in place.

    The interaction weights become parameters of the model: they move, train and are sharded with
    it. Use as a context manager to detach at the end.
    """
    config = PruningConfig() if config is None else config
    if not isinstance(config, Method):
        raise PruneError(
            f"{config!r} is not a configuration; pass a PruningConfig, LocalConfig, ..."
        )
    sites = host.find_sites(model)
    if any(layer_of(module) for module in model.modules()):
        raise PruneError(f"{type(model).__name__} has pruning attached already; detach it first")
    _refuse_nan(model)
    return Pruned(model, config, sites)


class Pruned:
    """A model with pruning attached: its switches, its measurements, and the way back."""

    def __init__(self, model: PreTrainedModel, config: Method, sites: list[host.Site]):
        self.model, self.config = model, config
        self._working = config
        self.name = ""  # of the adapter; `load` sets it
        # whether the weights without LoRA are the base's: not if it was merged or all were trained
        self.has_base = True
        self.observer: Observer | None = None
        # for a compiled graph a tensor: the schedule changes it at every step
        self._alpha_in_graph = torch.zeros((), dtype=torch.float64)
        self.alpha = config.start_alpha
        self._hard: bool | None = None
        self.merged = False  # whether LoRA was folded into the model's weights, for good
        # where the tokenizer is loaded from, a folder or a name; None: as the model's own name
        self.tokenizer_name: str | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self.left_alone = {site.name: site.left_alone for site in sites if site.left_alone}
        if self.left_alone:
            log.info("left alone: %s", self.left_alone)
        self.sites = [site for site in sites if not site.left_alone]
        self.layers = [self._attach_layer(number, site) for number, site in enumerate(self.sites)]
        self._undo: list[Callable[[PreTrainedModel], None]] = []
        self._configs = _own_configs(model, self.sites)
        self._hooks = Hooks(self)

    def _attach_layer(self, number: int, site: host.Site) -> Layer:
        device = next(site.module.parameters()).device
        width = host.hidden_size(site.module, self.model.config)
        interaction = self.config.new_interaction(width, device)
        if interaction is not None:
            # a child of the attention module: to(), parameters(), DDP and FSDP see it there
            site.module.interaction = interaction
            interaction.train(site.module.training)
        layer = Layer(site.name, site.index, number, interaction)
        site.module._kvprune = layer  # type: ignore[assignment]
        return layer

    def fingerprint(self) -> dict[str, Any]:
        """Of the weights and settings that decide what a cache holds; see `Snapshot`."""
        return fingerprint(self.model, self)

    @property
    def interactions(self) -> nn.ModuleList:
        """The learned parts, one per pruned layer: .query, .key, .beta."""
        return nn.ModuleList(layer.interaction for layer in self.layers if layer.interaction)

    @property
    def device(self) -> torch.device:
        """Where the model is; inputs go there."""
        return self.model.device

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded at first use; one that was set takes precedence."""
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer()
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def _load_tokenizer(self) -> PreTrainedTokenizerBase:
        from kvprune.adapters.pretrained import load_tokenizer

        name = self.tokenizer_name or self.model.config.name_or_path
        remedy = "set pruned.tokenizer = AutoTokenizer.from_pretrained(...)"
        if not name:
            raise PruneError(
                f"this {type(self.model).__name__} has no name to load a tokenizer by; {remedy}"
            )
        try:
            return load_tokenizer(name)
        except PruneError as error:
            raise PruneError(f"{error}; {remedy}") from error

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `model.generate`, with the same arguments: it reads and writes with a pruned cache."""
        if not self._configs:
            raise PruneError("pruning was detached; call model.generate, or attach again")
        return self.model.generate(*args, **kwargs)  # type: ignore[operator]

    @property
    def rank(self) -> int:
        """Width of the interaction keys that a cache stores; 0 for a method without weights."""
        return self.config.key_int_width

    @property
    def working(self) -> Method:
        """The configuration in force: `config`, or inside of `dense()` that of no pruning."""
        return self._working

    @property
    def drops(self) -> bool:
        """Whether a forward pass of the model as it is now drops tokens outright."""
        if not self._working.learns or self._steep:
            return True
        return not self.model.training if self._hard is None else self._hard

    @property
    def alpha(self) -> float:
        """α of the gate in train mode; in eval mode the gate is the step function."""
        return self._alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._alpha = check_alpha(alpha)
        self._steep = math.isinf(self._alpha)  # a graph that asked α itself would depend on it
        self._alpha_in_graph.fill_(self._alpha)

    @property
    def hard(self) -> bool | None:
        """Whether tokens are dropped outright; None: in eval mode they are, in training not."""
        return self._hard

    @hard.setter
    def hard(self, hard: bool | None) -> None:
        self._hard = hard

    def adjust(self, **settings: Any) -> None:
        """Change what needs no new training: threshold, protect_first, protect_recent.

        From the next token on: what a cache has dropped already stays dropped.
        """
        adjustable = self._working.adjustable
        if not adjustable:
            raise PruneError(f"{self._working.method} attention has nothing to adjust")
        if unknown := sorted(set(settings) - set(adjustable)):
            raise PruneError(
                f"{', '.join(unknown)} cannot be changed while attached, only "
                f"{', '.join(adjustable)}; attach again with another configuration"
            )
        self.config = self._working = replace(self._working, **settings)

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Every gate open for a while: the model without pruning, though it stays attached."""
        with self.following(DenseConfig()):
            yield

    @contextmanager
    def following(self, method: Method) -> Iterator[None]:
        """Another method for a while; one that has no weights of its own."""
        config, self._working = self._working, method
        try:
            yield
        finally:
            self._working = config

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """For a while, call `observer` with what each layer's attention is given and gives.

        In hard passes over several tokens; not for methods that watch attention (TOVA, H2O).
        """
        before, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = before

    @property
    def last_pass(self) -> Outcome:
        """What the last forward pass left behind."""
        if self._hooks.last is None:
            raise PruneError("the model has not run yet; call model(ids) first")
        return self._hooks.last

    def sparsity_loss(self) -> Tensor:
        """L_sparsity / γ of the last training pass: the mean of keep over layers and pairs j < k.

        Paper:  2 / (L n (n−1)) Σ_{ℓ, j<k} keep. Differentiable.
        """
        return self.keep_by_layer().mean()

    def keep_by_layer(self) -> Tensor:
        """The same before the mean over layers: (L,)."""
        last = self._hooks.last_training
        if last is None or not last.layers:
            raise PruneError(
                "there was no training pass yet; call model.train() and run the model first"
            )
        keep = last.keep_by_layer()
        learns = any(p.requires_grad for p in self.interactions.parameters())
        if torch.is_grad_enabled() and learns and not last.hard and not keep.requires_grad:
            raise PruneError(
                "the last training pass kept no gradients: it ran under no_grad or with reentrant "
                "checkpointing; use gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return keep

    def sparsity(self) -> Sparsity:
        """How much the last pass dropped, in all and per layer; of a soft pass, 1 − mean keep."""
        with torch.no_grad():
            per_layer = 1 - self.last_pass.keep_by_layer().detach().cpu()
        return Sparsity(float(per_layer.mean()), per_layer)

    @torch.no_grad()
    def trace(self, ids: Tensor | list[int], attention_mask: Tensor | None = None) -> Tensor:
        """When each token of ids (B, T) or (T,) is dropped: (L, B, T), kvprune.NEVER if it stays.

        The token at that step is the one that dropped it: the whole record of what was forgotten.
        """
        ids = torch.as_tensor(ids, device=self.model.device)
        ids = ids[None] if ids.dim() == 1 else ids
        with self.evaluating():
            self.model.base_model(input_ids=ids, attention_mask=attention_mask, use_cache=False)
        steps = self.last_pass.drop_step()
        assert steps is not None, "the gate was hard"
        return steps

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode and the hard gate for a while; every module's own mode comes back."""
        hard, self._hard = self._hard, True
        try:
            with evaluating(self.model):
                yield
        finally:
            self._hard = hard

    def save(self, path: str | Path) -> Path:
        """Write an adapter into the folder: interaction weights, configuration, and LoRA if any.

        Returns its file. While attached, `model.save_pretrained` writes the same, and without
        LoRA the model's own weights too.
        """
        from kvprune.adapters.save import save

        return save(self, path)

    def _save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        from kvprune.adapters.save import save_pretrained

        save_pretrained(self, *args, **kwargs)

    def on_detach(self, undo: Callable[[PreTrainedModel], None]) -> None:
        """Have `undo` called with the model when all else is off again."""
        self._undo.append(undo)

    def detach(self) -> PreTrainedModel:
        """Take everything off: the model is what it was, bit for bit."""
        self._hooks.remove()
        for module in self.model.modules():
            layer = layer_of(module)
            if layer is not None:
                del module._kvprune
                if layer.interaction is not None:
                    del module.interaction
        for module, config in self._configs:
            setattr(module, "config", config)  # noqa: B010
        for undo in self._undo:
            undo(self.model)
        self._configs, self._undo = [], []
        return self.model

    def __enter__(self) -> Pruned:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        layers = f"{len(self.layers)} layers"
        if self.left_alone:
            layers += f", {len(self.left_alone)} left alone"
        return f"Pruned({type(self.model).__name__}, {self.config}, {layers})"


def _own_configs(
    model: PreTrainedModel, sites: list[host.Site]
) -> list[tuple[nn.Module, PreTrainedConfig]]:
    """Give the model configs of its own that name our attention; returns the old ones.

    A config object may be shared with other models, which must not change.
    """
    pruned = {id(site.module.config) for site in sites}
    configured = [(module, getattr(module, "config", None)) for module in model.modules()]
    old = [(m, config) for m, config in configured if isinstance(config, PreTrainedConfig)]
    own = {id(config): copy.copy(config) for _, config in old}
    for module, config in old:
        new = own[id(config)]
        setattr(module, "config", new)  # noqa: B010
        if id(config) in pruned:
            new._attn_implementation_internal = _register(config._attn_implementation)
        for name in config.sub_configs:
            part = getattr(config, name, None)
            setattr(new, name, own.get(id(part), part))
    return old


def _register(implementation: str) -> str:
    """Make our attention known under a name that says what the layers left alone use."""
    inner = "sdpa" if implementation == "sdpa" else "eager"
    name = f"kvprune_{inner}"
    AttentionInterface.register(name, functools.partial(attention.attention, inner=inner))
    AttentionMaskInterface.register(name, functools.partial(attention.padding_mask, inner))
    return name


def _refuse_nan(model: PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        # one pass and no copy; a NaN or Inf anywhere makes the sum one too
        if not parameter.detach().sum(dtype=torch.float32).isfinite():
            raise PruneError(f"{name} holds NaN or Inf; load the model's weights again")
