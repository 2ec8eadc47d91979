"""The models timed against each other, each with a cache in the middle of a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.evaluate.throughput.budgets import budgeted
from kvprune.evaluate.throughput.decoding import dense_cache, filled_cache
from kvprune.evaluate.throughput.models import ModelPair
from kvprune.evaluate.throughput.rigged import steady_votes
from kvprune.integration.handle import Pruned, attach
from kvprune.integration.row_lora import twin
from kvprune.methods.base import Method
from kvprune.methods.learned import PruningConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Contestant:
    """A model, and how to make its cache after `context` tokens: cache(batch, context, room)."""

    name: str
    method: str
    model: PreTrainedModel
    cache: Callable[[int, int, int], Cache]


def realistic(models: ModelPair, static: bool = False) -> list[Contestant]:
    """Dense, and pruned by the model's own decisions on real text: rows and layers differ."""
    contestants = _dense(models.dense, static)
    if (pruned := models.pruned) is not None:
        assert models.text is not None
        text = models.text

        def read(batch: int, context: int, room: int) -> Cache:
            cache = PrunedCache(pruned)
            with torch.inference_mode():
                ids = rows_of(text, batch, context).to(pruned.model.device)
                pruned.model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
            return cache

        contestants.append(Contestant("pruned", pruned.config.method, pruned.model, read))
    return contestants


def ideal(
    models: ModelPair,
    context: int,
    sparsity: float,
    baselines: tuple[str, ...] = (),
    static: bool = False,
    rank: int = 64,
) -> list[Contestant]:
    """Dense, and all others with (1 − sparsity) · context tokens in every row and layer."""
    kept = max(1, round((1 - sparsity) * context))
    rank = rank if models.pruned is None else models.pruned.rank or rank
    methods: list[Method] = [PruningConfig(rank=rank)]
    methods += [budgeted(name, kept, context) for name in baselines]
    contestants = _dense(models.dense, static)
    for method in methods:
        pruned = attach(twin(models.dense), method)
        if method.learns:
            vocabulary = models.dense.config.get_text_config().vocab_size
            ids = torch.randint(vocabulary, (1, min(64, context)))
            steady_votes(pruned, ids.to(models.dense.device), kept)
        name = "pruned" if method.learns else method.method
        contestants.append(Contestant(name, method.method, pruned.model, _filler(pruned, kept)))
    return contestants


def rows_of(text: Tensor, batch: int, length: int) -> Tensor:
    """`batch` passages of the text, evenly spread over it: (batch, length)."""
    if len(text) < length:
        raise PruneError(
            f"the text has {len(text)} tokens, but the context is to be {length}; pass a longer "
            f"--text or a shorter --context"
        )
    starts = [(len(text) - length) * row // max(batch - 1, 1) for row in range(batch)]
    return torch.stack([text[start : start + length] for start in starts])


def _dense(model: PreTrainedModel, static: bool) -> list[Contestant]:
    kinds = {"dense": "dynamic", "dense, static": "static"} if static else {"dense": "dynamic"}
    return [
        Contestant(name, "dense", model, partial(dense_cache, kind, model))
        for name, kind in kinds.items()
    ]


def _filler(pruned: Pruned, kept: int) -> Callable[[int, int, int], Cache]:
    """Rows that all hold `kept` tokens; those of a fixed pattern hold what the pattern leaves."""
    layers = len(pruned.sites)

    def fill(batch: int, context: int, room: int) -> Cache:
        token = pruned.config.held(context, kept)
        return filled_cache(pruned, context, torch.full((layers, batch), len(token)), token)

    return fill
