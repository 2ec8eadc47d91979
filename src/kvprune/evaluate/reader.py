"""A model reading a batch, whole or in chunks through its cache: logits, and what was dropped."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvprune.adapters.dense import as_base_model
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned
from kvprune.integration.layer import layer_of


class Reader:
    """One model, pruned by its own hard gate, or dense: untouched, or with every gate open."""

    def __init__(self, model: PreTrainedModel | Pruned, gates_open: bool = False):
        self.pruned = model if isinstance(model, Pruned) else None
        self.model = model.model if isinstance(model, Pruned) else model
        self.gates_open = gates_open
        if self.pruned is None and any(layer_of(module) for module in self.model.modules()):
            raise PruneError(
                f"this {type(self.model).__name__} has pruning attached; pass the Pruned that "
                f"attach or load returned"
            )
        self.drop_step: Tensor | None = None  # (L, B, T) of the last batch; None: nothing drops

    @torch.no_grad()
    def read(self, ids: Tensor, chunk: int | None = None, skip: int = 0) -> Iterator[Tensor]:
        """The logits of ids (B, T) in parts (B, chunk, V); None reads all at once, uncached.

        `skip`: of the first so many tokens none are made; only where all are read at once.
        """
        assert not (chunk and skip), "parts come with all their logits"
        ids = ids.to(self.model.device)
        self.drop_step = None
        # a cache is made for the configuration that works at the moment
        with self._as_asked():
            cache = self._cache() if chunk else None
        asked = {"logits_to_keep": ids.shape[1] - skip} if skip and self._can_skip else {}
        for part in ids.split(chunk or ids.shape[1], dim=1):
            with self._as_asked():
                out: Any = self.model(
                    input_ids=part, past_key_values=cache, use_cache=cache is not None, **asked
                )
            if self.pruned and not self.gates_open:
                self.drop_step = self._drop_step(self.pruned, cache)
            yield out.logits if asked else out.logits[:, skip:]

    @property
    def _can_skip(self) -> bool:
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def _cache(self) -> Any:
        if self.pruned is None:
            return DynamicCache(config=self.model.config)
        return PrunedCache(self.pruned, record=not self.gates_open)

    @contextmanager
    def _as_asked(self) -> Iterator[None]:
        if self.pruned is not None:
            with as_base_model(self.pruned) if self.gates_open else self.pruned.evaluating():
                yield
            return
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training

    @staticmethod
    def _drop_step(pruned: Pruned, cache: PrunedCache | None) -> Tensor:
        if cache is not None:
            return cache.drop_step
        steps = [layer.drop_step for layer in pruned.layers if layer.drop_step is not None]
        return torch.stack([step.cpu() for step in steps])


def dropped_by(drop_step: Tensor) -> Tensor:
    """How many earlier tokens each token no longer sees: (..., T) → (..., T).

    Token j is gone for k iff drop_step[j] ≤ k, so this is a count of steps, summed up.
    """
    T = drop_step.shape[-1]
    left = torch.zeros(*drop_step.shape[:-1], T + 1)
    left.scatter_add_(-1, drop_step.clamp(max=T).long(), torch.ones(drop_step.shape))
    return left[..., :T].cumsum(-1).long()
