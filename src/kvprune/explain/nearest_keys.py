"""The distance of each token's key to the nearest other key, for dropped and kept tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.ops.timeline import NEVER
from kvprune.utils.processes import ALONE, Group

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned


@dataclass(frozen=True)
class NearestKeys:
    """Histograms and means of the smallest cosine distance between keys, over texts and layers."""

    edges: list[float]
    dropped: list[float]  # shares of the dropped tokens, summing to 1 over the bins
    kept: list[float]
    mean_dropped: list[float]  # per layer, NaN without dropped tokens
    mean_kept: list[float]


def nearest_keys(
    pruned: Pruned,
    rows: Sequence[Sequence[int]],
    among_kept: bool = False,
    bins: int = 40,
    group: Group = ALONE,
) -> NearestKeys:
    """Paper, Fig. dropped_not_dropped: 1 − max_{i ≠ j} cos(k_j, k_i) for each token j.

    Keys as stored in the cache, all heads concatenated. i runs over all other tokens, as in the
    paper's text, or with `among_kept` over those that the layer never drops, as in its caption.
    A layer that drops nothing in a text is skipped for that text. Processes of a `group` share the
    rows, and all return the same.
    """
    L = len(pruned.layers)
    dropped: list[list[float]] = [[] for _ in range(L)]
    kept: list[list[float]] = [[] for _ in range(L)]
    for by_layer in group.map(rows, lambda ids: _distances(pruned, ids, among_kept)):
        for layer, (gone, stays) in enumerate(by_layer):
            dropped[layer] += gone.tolist()
            kept[layer] += stays.tolist()
    groups = [np.concatenate([np.array(layer) for layer in kind]) for kind in (dropped, kept)]
    edges = np.linspace(0, max([1e-6, *(float(v.max()) for v in groups if len(v))]), bins + 1)
    shares = [np.histogram(values, edges)[0] / max(len(values), 1) for values in groups]
    means = [
        [float(np.mean(layer)) if layer else float("nan") for layer in kind]
        for kind in (dropped, kept)
    ]
    return NearestKeys(edges.tolist(), shares[0].tolist(), shares[1].tolist(), means[0], means[1])


def _distances(
    pruned: Pruned, ids: Sequence[int], among_kept: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Per layer those of the dropped tokens, and those of the kept ones."""
    found = []
    for keys, step in zip(*keys_of(pruned, ids), strict=True):
        stays = step == NEVER
        distance = nearest_distance(keys, stays if among_kept else torch.ones_like(stays))
        counts = distance.isfinite() & ~stays.all()
        found.append((distance[counts & ~stays].numpy(), distance[counts & stays].numpy()))
    return found


def nearest_distance(keys: Tensor, candidates: Tensor) -> Tensor:
    """The smallest cosine distance of each key (T, D) to another candidate (T,); inf if none."""
    unit = torch.nn.functional.normalize(keys.float(), dim=-1)
    distance = 1 - unit @ unit.T  # (T, T)
    distance[:, ~candidates] = torch.inf
    distance.fill_diagonal_(torch.inf)
    smallest: Tensor = distance.min(-1).values
    return smallest.where(smallest.isinf(), smallest.clamp(min=0))


@torch.no_grad()
def keys_of(pruned: Pruned, ids: Sequence[int]) -> tuple[list[Tensor], Tensor]:
    """Per layer the keys of all tokens, including dropped ones, (T, H·D); and drop steps (L, T)."""
    keys: list[Tensor] = []

    def note(layer: int, key: Tensor, value: Tensor) -> None:
        keys.append(key[0].transpose(0, 1).flatten(1).cpu())

    cache = PrunedCache(pruned, record=True, recorder=note)
    row = torch.tensor([list(ids)], device=pruned.model.device)
    with pruned.evaluating():
        pruned.model.base_model(input_ids=row, past_key_values=cache, use_cache=True)
    return keys, cache.drop_step[:, 0]
