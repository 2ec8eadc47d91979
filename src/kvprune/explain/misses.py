"""Which tokens pruning made harder to predict, and which dropped tokens they lacked."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.explain.cost import Place, Return
from kvprune.explain.estimate import estimated_change
from kvprune.explain.replay import last_logits, read, recorded, row
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned


class Trial(NamedTuple):
    """Dropped tokens to bring back together, for the prediction of a later token."""

    target: int
    places: tuple[Place, ...]


def worst(loss: np.ndarray, dense_loss: np.ndarray, most: int) -> list[int]:
    """The tokens that cost most, the worst first; none that cost nothing."""
    cost = np.nan_to_num(loss - dense_loss, nan=-np.inf)
    order = np.argsort(-cost, kind="stable")[:most]
    return [int(token) for token in order if cost[token] > 0]


def returned(drop_step: np.ndarray, places: Sequence[Place]) -> np.ndarray:
    """The record (L, T) with these tokens brought back."""
    changed: np.ndarray = drop_step.copy()
    for token, layer in places:
        changed[slice(None) if layer is None else layer, token] = NEVER
    return changed


def find_returns(
    pruned: Pruned,
    ids: Sequence[int],
    drop_step: np.ndarray,
    targets: Sequence[int],
    tries: int = 4,
    progress: bool = False,
) -> dict[int, tuple[Return, ...]]:
    """For each target the dropped tokens whose return was tried, the most helpful first."""
    found: dict[int, list[Return]] = {target: [] for target in targets}
    with tqdm(total=2 * len(targets), desc="bring back", disable=None if progress else True) as bar:
        trials: list[Trial] = []
        for target in targets:
            estimate = estimated_change(pruned, ids, drop_step, target)
            trials += [Trial(target, (place,)) for place in promising(estimate, tries)]
            bar.update()
        for trial, loss in verify(pruned, ids, drop_step, trials):
            found[trial.target].append(Return(*trial.places[0], loss))
            bar.update(len(targets) / len(trials))
    return {target: tuple(sorted(found[target], key=lambda back: back.loss)) for target in targets}


def promising(estimate: np.ndarray, most: int) -> list[Place]:
    """The places with the lowest estimate (L, T): half of them in all layers, half in a single one.

    None whose return would not help, and no single layer that is the only one for its token.
    """
    layers = (estimate != 0).sum(0)
    whole, single = estimate.sum(0), np.where(layers > 1, estimate, 0.0)
    half = -(-most // 2)
    places: list[Place] = [
        (int(token), None) for token in np.argsort(whole, kind="stable")[:half] if whole[token] < 0
    ]
    for flat in np.argsort(single, axis=None, kind="stable")[: most - half]:
        layer, token = divmod(int(flat), len(whole))
        if single[layer, token] < 0:
            places.append((token, layer))
    return places


def verify(
    pruned: Pruned, ids: Sequence[int], drop_step: np.ndarray, trials: Sequence[Trial]
) -> Iterator[tuple[Trial, float]]:
    """The target's exact loss in each trial, in the order in which they part from the record.

    Nothing differs before the token that dropped the first of those brought back. So the text is
    read once, as recorded, and each trial goes on from a copy of the cache at that token.
    """
    cache, so_far = None, 0
    forks = [min(_first_change(drop_step, t.places), t.target - 1) for t in trials]
    for fork, trial in sorted(zip(forks, trials, strict=True), key=lambda pair: pair[0]):
        with pruned.following(recorded(pruned, drop_step)):
            cache = PrunedCache(pruned) if cache is None else cache
            if fork > so_far:
                read(pruned, ids[so_far:fork], cache)
                so_far = fork
        method = recorded(pruned, returned(drop_step, trial.places))
        part = row(pruned, ids[so_far : trial.target])
        with torch.no_grad(), pruned.evaluating(), pruned.following(method):
            logits = last_logits(pruned, part, copy.deepcopy(cache) if so_far else None)
        yield trial, float(-logits.float().log_softmax(-1)[ids[trial.target]])


def _first_change(drop_step: np.ndarray, places: Sequence[Place]) -> int:
    """The first token that sees something else than in the record."""
    return min(
        int(drop_step[slice(None) if layer is None else layer, token].min())
        for token, layer in places
    )
