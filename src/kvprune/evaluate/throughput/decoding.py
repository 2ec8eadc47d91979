"""Caches in the middle of a text, and calls that decode from there: what a benchmark times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.integration import host
from kvprune.integration.handle import Pruned


def dense_cache(
    kind: str, model: PreTrainedModel, batch: int, context: int, room: int = 0
) -> Cache:
    """A "dynamic" or "static" cache with `context` random tokens and room for more."""
    cache = empty_cache(kind, model, context + room)
    _, heads, size, value_size = host.heads(model.config)
    for layer in range(model.config.get_text_config().num_hidden_layers):
        shape, place = (batch, heads, context), model.device
        key = torch.randn(*shape, size, device=place).to(model.dtype)
        value = torch.randn(*shape, value_size, device=place).to(model.dtype)
        cache.update(key, value, layer)
    return cache


def empty_cache(kind: str, model: PreTrainedModel, length: int) -> Cache:
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    raise PruneError(f"a cache of kind {kind!r} is unknown; choose dynamic or static")


def filled_cache(
    pruned: Pruned, context: int, kept: Tensor, token: Tensor | None = None, **storage: Any
) -> PrunedCache:
    """A PrunedCache as it would be after `context` tokens, with random contents.

    kept: (L, B), tokens that each layer holds of each row; token: which ones, the last if None;
    storage: options of PrunedCache.
    """
    cache = PrunedCache(pruned, **storage)
    _, heads, size, value_size = host.heads(pruned.model.config)
    device, dtype = pruned.device, pruned.model.dtype
    for store, counts in zip(cache.stores, kept, strict=True):
        (B,), S = counts.shape, int(counts.max())
        key = torch.randn(B, heads, S, size, device=device).to(dtype)
        value = torch.randn(B, heads, S, value_size, device=device).to(dtype)
        table = store.begin(key[:, :, :0], value[:, :, :0])
        valid = torch.arange(S) < counts[:, None]
        number = torch.arange(context - S, context) if token is None else token[:S]
        columns = {name: torch.rand(B, S, *shape) for name, shape in table.extra.items()}
        extra = {name: column.to(device) for name, column in columns.items()}
        key_int = torch.randn(B, S, pruned.rank, device=device)
        places = number.expand(B, S).to(device), valid.to(device)
        table.push(key, value, key_int, *places, **extra)
        store.seen = context
    return cache


def stepper(
    model: PreTrainedModel, cache: Cache, batch: int, steps: int, start: Tensor | None = None
) -> Callable[[], None]:
    """A call that decodes `steps` tokens as `generate` does, each from the last one's argmax."""
    token = torch.ones(batch, 1, dtype=torch.long) if start is None else start  # (B, 1)
    token = token.to(model.device)

    @torch.inference_mode()
    def run() -> None:
        nonlocal token
        for _ in range(steps):
            seen = int(cache.get_seq_length())
            mask = torch.ones(batch, seen + 1, dtype=torch.long, device=model.device)
            position = torch.full((batch, 1), seen, device=model.device)
            logits = model(
                input_ids=token, attention_mask=mask, position_ids=position,
                past_key_values=cache, use_cache=True, logits_to_keep=1,
            ).logits  # fmt: skip
            token = logits[:, -1].argmax(-1, keepdim=True)
        if token.is_cuda:
            torch.cuda.synchronize()

    return run
