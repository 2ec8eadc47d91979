"""A model that reads a batch, at once or in chunks through its cache: logits, and what it drops."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvprune.adapters.dense import as_base_model
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.integration.handle import Pruned
from kvprune.integration.unwrap import unwrap
from kvprune.utils.modes import evaluating


class Reader:
    """One model: dense, pruned by its own hard gate, or pruned but with every gate open."""

    def __init__(self, model: PreTrainedModel | Pruned, gates_open: bool = False):
        self.model, self.pruned = unwrap(model)
        self.gates_open = gates_open
        self.drop_step: Tensor | None = None  # (L, B, T) of the last batch; None: nothing drops

    @torch.no_grad()
    def read(self, ids: Tensor, chunk: int | None = None, skip: int = 0) -> Iterator[Tensor]:
        """The logits of ids (B, T) in parts (B, chunk, V); without chunk all at once, uncached.

        `skip`: leave out the logits of the first `skip` tokens; not with chunks.
        """
        assert not (chunk and skip), "chunks come with all their logits"
        ids = ids.to(self.model.device)
        self.drop_step = None
        with self.mode():
            cache = self.new_cache() if chunk else None
        options = {"logits_to_keep": ids.shape[1] - skip} if skip and self.can_skip else {}
        for part in ids.split(chunk or ids.shape[1], dim=1):
            with self.mode():
                out: Any = self.model(
                    input_ids=part, past_key_values=cache, use_cache=cache is not None, **options
                )
            if self.pruned and not self.gates_open:
                self.drop_step = last_drop_step(self.pruned) if cache is None else cache.drop_step
            yield out.logits if options else out.logits[:, skip:]

    @property
    def can_skip(self) -> bool:
        """Whether the model can leave out logits that nobody needs."""
        return "logits_to_keep" in inspect.signature(self.model.forward).parameters

    def new_cache(self) -> Any:
        """An empty cache; create it in `mode`, as it is made for the active method."""
        if self.pruned is None:
            return DynamicCache(config=self.model.config)
        return PrunedCache(self.pruned, record=not self.gates_open)

    def mode(self) -> AbstractContextManager[None]:
        """While the model is called: eval mode, with its own gates or with all of them open."""
        if self.pruned is None:
            return evaluating(self.model)
        return as_base_model(self.pruned) if self.gates_open else self.pruned.evaluating()


def last_drop_step(pruned: Pruned) -> Tensor:
    """When each token of the last uncached pass was dropped: (L, B, T), on the CPU."""
    steps = pruned.last_pass.drop_step()
    assert steps is not None, "the gate was hard"
    return steps


def dropped_by(drop_step: Tensor) -> Tensor:
    """How many earlier tokens each token no longer sees: (..., T) → (..., T).

    Token j is gone for k iff drop_step[j] ≤ k, so this is a running count of drop steps.
    """
    T = drop_step.shape[-1]
    drops = torch.zeros(*drop_step.shape[:-1], T + 1)
    drops.scatter_add_(-1, drop_step.clamp(max=T).long(), torch.ones(drop_step.shape))
    return drops[..., :T].cumsum(-1).long()
