"""Are tokens dropped that have a twin? The nearest key of each token, dropped against kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.ops.timeline import NEVER

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned


@dataclass(frozen=True)
class Nearest:
    """The smallest cosine distance of a token's key to another's, over texts and layers."""

    edges: list[float]
    dropped: list[float]  # shares of the dropped tokens: they sum to 1 over the bins
    kept: list[float]
    mean_dropped: list[float]  # by layer, NaN where there is none
    mean_kept: list[float]


def nearest(
    pruned: Pruned, rows: Sequence[Sequence[int]], among_kept: bool = False, bins: int = 40
) -> Nearest:
    """Paper, Fig. dropped_not_dropped: 1 − max_{i ≠ j} cos(k_j, k_i) for each token j.

    Keys as the cache holds them, all heads as one vector. i runs over all other tokens, as the
    paper's text says; `among_kept`: over those that the layer never drops, as its caption says.
    A layer that drops nothing in a text is left out of it: it has nothing to compare.
    """
    L = len(pruned.layers)
    gone: list[list[float]] = [[] for _ in range(L)]
    stay: list[list[float]] = [[] for _ in range(L)]
    for ids in rows:
        for layer, (keys, step) in enumerate(zip(*keys_of(pruned, ids), strict=True)):
            kept = step == NEVER
            if kept.all():
                continue
            candidates = kept if among_kept else torch.ones_like(kept)
            distance = nearest_distance(keys, candidates)
            there = distance.isfinite()
            gone[layer] += distance[there & ~kept].tolist()
            stay[layer] += distance[there & kept].tolist()
    every = [np.concatenate([np.array(part) for part in parts]) for parts in (gone, stay)]
    edges = np.linspace(0, max([1e-6, *(float(v.max()) for v in every if len(v))]), bins + 1)
    shares = [np.histogram(values, edges)[0] / max(len(values), 1) for values in every]
    means = [[float(np.mean(v)) if v else float("nan") for v in parts] for parts in (gone, stay)]
    return Nearest(edges.tolist(), shares[0].tolist(), shares[1].tolist(), means[0], means[1])


def nearest_distance(keys: Tensor, candidates: Tensor) -> Tensor:
    """The smallest cosine distance of each key (T, D) to another of `candidates` (T,), or inf."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    distance = 1 - unit @ unit.T  # (T, T)
    distance[:, ~candidates] = torch.inf
    distance.fill_diagonal_(torch.inf)
    smallest: Tensor = distance.min(-1).values
    return smallest.where(smallest.isinf(), smallest.clamp(min=0))


@torch.no_grad()
def keys_of(pruned: Pruned, ids: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """The keys of every token, the dropped among them, (T, H·D) a layer; and drop steps (L, T)."""
    cache = PrunedCache(pruned, record=True)
    found: list[Tensor] = []
    for store in cache.stores:
        # the table that attention asks for when it brings all its keys
        store.begin = functools.partial(_noted, found, store.begin)  # type: ignore[method-assign]
    row = torch.tensor([list(ids)], device=pruned.model.device)
    with pruned.evaluating():
        pruned.model.base_model(input_ids=row, past_key_values=cache, use_cache=True)
    return found, cache.drop_step[:, 0]


def _noted(found: list[Tensor], begin: Callable[..., Any], key: Tensor, value: Tensor) -> Any:
    found.append(key[0].transpose(0, 1).flatten(1).cpu())
    return begin(key, value)
