"""Attach pruning to a model in place, and take it off again without a trace."""

from __future__ import annotations

import copy
import functools
import logging
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
)

from kvprune.config import Config, DenseConfig, PruningConfig, check_alpha
from kvprune.errors import PruneError
from kvprune.integration import attention, host
from kvprune.integration.hooks import Generation
from kvprune.integration.layer import Layer, Settings, layer_of, share
from kvprune.methods.interaction import Interaction

log = logging.getLogger(__name__)

ADJUSTABLE = ("threshold", "protect_first", "protect_recent")  # while the model is attached


class Sparsity(NamedTuple):
    """The share of earlier tokens that were dropped, over all pairs j < k of real tokens."""

    total: float
    per_layer: Tensor  # (L,)

    def __float__(self) -> float:
        return self.total


def attach(model: PreTrainedModel, config: Config | None = None) -> Pruned:
    """Put pruning (or a baseline) into every full-attention layer of the model, in place.

    The interaction weights become parameters of the model: they move, train and are sharded with
    it. Use as a context manager to detach at the end.
    """
    config = PruningConfig() if config is None else config
    if not isinstance(config, Config):
        raise PruneError(f"{config!r} is no configuration; pass a PruningConfig, LocalConfig, ...")
    sites = host.find_sites(model)
    if any(layer_of(module) for module in model.modules()):
        raise PruneError(f"{type(model).__name__} has pruning attached already; detach it first")
    _refuse_nan(model)
    return Pruned(model, config, sites)


class Pruned:
    """A model with pruning attached: its switches, its measurements, and the way back."""

    def __init__(self, model: PreTrainedModel, config: Config, sites: list[host.Site]):
        self.model, self.config = model, config
        alpha = config.alpha if isinstance(config, PruningConfig) else float("inf")
        self._settings = Settings(config, alpha)
        self.left_alone = {site.name: site.left_alone for site in sites if site.left_alone}
        if self.left_alone:
            log.info("left alone: %s", self.left_alone)
        self.sites = [site for site in sites if not site.left_alone]
        self.layers: list[Layer] = []
        self._hooks: list[Any] = []
        self._undo: list[Callable[[PreTrainedModel], None]] = []
        for site in self.sites:
            self._attach_layer(site)
        self._configs = _own_configs(model, self.sites)
        self._generation = Generation(self)

    def _attach_layer(self, site: host.Site) -> None:
        interaction = None
        if isinstance(self.config, PruningConfig):
            device = next(site.module.parameters()).device
            width = host.hidden_size(site.module, self.model.config)
            interaction = Interaction(width, self.config.rank, self.config.beta, device)
            # a child of the attention module: to(), parameters(), DDP and FSDP see it there
            site.module.interaction = interaction
            interaction.train(site.module.training)
        layer = Layer(site.name, site.index, self._settings, interaction, list(self.layers))
        site.module._kvprune = layer  # type: ignore[assignment]
        self.layers.append(layer)
        self._hooks += [
            site.module.register_forward_pre_hook(layer.before, with_kwargs=True),
            site.module.register_forward_hook(layer.after),
        ]

    @property
    def interactions(self) -> nn.ModuleList:
        """The learned parts, one a pruned layer: .query, .key, .beta."""
        return nn.ModuleList(layer.interaction for layer in self.layers if layer.interaction)

    @property
    def rank(self) -> int:
        """Width of the interaction keys that a cache stores; 0 for a baseline."""
        return self.config.rank if isinstance(self.config, PruningConfig) else 0

    @property
    def working(self) -> Config:
        """The configuration that works now: `config`, or inside of `dense()` that of no pruning."""
        return self._settings.config

    @property
    def drops(self) -> bool:
        """Whether a forward pass of the model as it is now drops tokens outright."""
        return self._settings.is_hard(self.model.training)

    @property
    def alpha(self) -> float:
        """α of the gate in train mode; in eval mode the gate is the step function."""
        return self._settings.alpha

    @alpha.setter
    def alpha(self, alpha: float) -> None:
        self._settings.alpha = check_alpha(alpha)

    @property
    def hard(self) -> bool | None:
        """Whether tokens are dropped outright; None: in eval mode they are, in training not."""
        return self._settings.hard

    @hard.setter
    def hard(self, hard: bool | None) -> None:
        self._settings.hard = hard

    def adjust(self, **settings: Any) -> None:
        """Change what needs no new training: threshold, protect_first, protect_recent.

        From the next token on: what a cache has dropped already stays dropped.
        """
        if unknown := sorted(set(settings) - set(ADJUSTABLE)):
            raise PruneError(
                f"{', '.join(unknown)} cannot be changed while attached, only "
                f"{', '.join(ADJUSTABLE)}; attach anew with another configuration"
            )
        if not isinstance(self.working, PruningConfig):
            raise PruneError(f"{self.working.method} attention has nothing to adjust")
        self.config = self._settings.config = replace(self.working, **settings)
        self._settings.forget()

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Every gate open for a while: the model without pruning, though it stays attached."""
        settings = self._settings
        config, settings.config = settings.config, DenseConfig()
        settings.forget()
        try:
            yield
        finally:
            settings.config = config
            settings.forget()

    def sparsity_loss(self) -> Tensor:
        """L_sparsity / γ of the last training pass: the mean of keep over layers and pairs j < k.

        Paper:  2 / (L n (n−1)) Σ_{ℓ, j<k} keep. Differentiable.
        """
        return self.keep_by_layer().mean()

    def keep_by_layer(self) -> Tensor:
        """The same before the mean over layers: (L,)."""
        shares = [
            share(layer.training_kept, layer.training_pairs)
            for layer in self.layers
            if layer.training_kept is not None and layer.training_pairs is not None
        ]
        if len(shares) < len(self.layers):
            raise PruneError(
                "there was no training pass yet; call model.train() and run the model first"
            )
        keep = torch.stack([s.to(shares[0].device) for s in shares])
        learns = any(p.requires_grad for p in self.interactions.parameters())
        soft = not self._settings.is_hard(training=True)
        if torch.is_grad_enabled() and learns and soft and not keep.requires_grad:
            raise PruneError(
                "the last training pass kept no gradients: it ran under no_grad or with reentrant "
                "checkpointing; use gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        return keep

    def sparsity(self) -> Sparsity:
        """How much the last pass dropped, in all and per layer; of a soft pass, 1 − mean keep."""
        measured = [layer.measured() for layer in self.layers]
        shares = [share(*pair).cpu() for pair in measured if pair is not None]
        if len(shares) < len(self.layers):
            raise PruneError("the model has not run yet; call model(ids) first")
        per_layer = 1 - torch.stack(shares)
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
        steps = [layer.drop_step for layer in self.layers if layer.drop_step is not None]
        return torch.stack([step.cpu() for step in steps])

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Eval mode and the hard gate for a while; every module's own mode comes back."""
        modes = [(module, module.training) for module in self.model.modules()]
        hard, self._settings.hard = self._settings.hard, True
        self.model.eval()
        try:
            yield
        finally:
            self._settings.hard = hard
            for module, training in modes:
                module.training = training

    def save(self, path: str | Path) -> Path:
        """Write the interaction weights and the configuration into the folder; returns the file."""
        from kvprune.adapters.save import save

        return save(self, path)

    def on_detach(self, undo: Callable[[PreTrainedModel], None]) -> None:
        """Have `undo` called with the model when all else is off again."""
        self._undo.append(undo)

    def detach(self) -> PreTrainedModel:
        """Take everything off: the model is what it was, bit for bit."""
        self._generation.remove()
        for hook in self._hooks:
            hook.remove()
        for module in self.model.modules():
            if layer_of(module):
                del module._kvprune
                if isinstance(self.config, PruningConfig):
                    del module.interaction
        for module, config in self._configs:
            setattr(module, "config", config)  # noqa: B010
        for undo in self._undo:
            undo(self.model)
        self._hooks, self._configs, self._undo = [], [], []
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
