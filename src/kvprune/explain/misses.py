"""Which tokens pruning made harder to predict, and which dropped tokens they lacked."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.explain.cost import Return
from kvprune.explain.estimate import estimated_change
from kvprune.explain.replay import last_logits, recorded, row
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned


class Trial(NamedTuple):
    """A dropped token to bring back for the prediction of a later one."""

    target: int
    token: int
    layer: int | None  # None: in all layers

    def drop_step(self, recorded: np.ndarray) -> np.ndarray:
        """The record (L, T) with the token brought back."""
        return returned(recorded, [(self.token, self.layer)])

    def first_change(self, recorded: np.ndarray) -> int:
        """The first token that sees something else than in the record."""
        rows = slice(None) if self.layer is None else self.layer
        return int(recorded[rows, self.token].min())


def returned(drop_step: np.ndarray, places: Sequence[tuple[int, int | None]]) -> np.ndarray:
    """The record (L, T) with tokens brought back, each (token, layer or None)."""
    changed: np.ndarray = drop_step.copy()
    for token, layer in places:
        changed[slice(None) if layer is None else layer, token] = NEVER
    return changed


def worst(loss: np.ndarray, dense_loss: np.ndarray, most: int) -> list[int]:
    """The tokens that cost most, the worst first; none that cost nothing."""
    cost = np.nan_to_num(loss - dense_loss, nan=-np.inf)
    order = np.argsort(-cost, kind="stable")[:most]
    return [int(token) for token in order if cost[token] > 0]


def trials(estimate: np.ndarray, target: int, most: int) -> list[Trial]:
    """The most promising returns, by the estimate (L, T): half of them in all layers at once."""
    whole = np.argsort(estimate.sum(0), kind="stable")[: -(-most // 2)]
    single = np.argsort(estimate, axis=None, kind="stable")[: most // 2]
    chosen = [Trial(target, int(token), None) for token in whole if estimate[:, token].any()]
    for place in single:
        layer, token = divmod(int(place), estimate.shape[1])
        if estimate[layer, token]:
            chosen.append(Trial(target, token, layer))
    return chosen


def verify(
    pruned: Pruned, ids: Sequence[int], drop_step: np.ndarray, chosen: Sequence[Trial]
) -> Iterator[tuple[Trial, float]]:
    """The target's loss in each trial, exactly; one at a time.

    Nothing differs before the token that dropped it, so the text is read once, and each trial
    goes on from a copy of the cache at that token.
    """
    cache, read = None, 0
    base = recorded(pruned, drop_step)
    for trial in sorted(chosen, key=lambda trial: trial.first_change(drop_step)):
        fork = trial.first_change(drop_step)
        with torch.no_grad(), pruned.evaluating():
            with pruned.following(base):
                cache = PrunedCache(pruned) if cache is None else cache
                if fork > read:
                    part = row(pruned, ids[read:fork])
                    pruned.model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
                    read = fork
            with pruned.following(recorded(pruned, trial.drop_step(drop_step))):
                part = row(pruned, ids[fork : trial.target])
                logits = last_logits(pruned, part, copy.deepcopy(cache))
        yield trial, float(-logits.float().log_softmax(-1)[ids[trial.target]])


def find_returns(
    pruned: Pruned,
    ids: Sequence[int],
    drop_step: np.ndarray,
    targets: Sequence[int],
    most: int = 6,
    progress: bool = False,
) -> dict[int, tuple[Return, ...]]:
    """For each target the dropped tokens whose return helps it, best first.

    `most` returns are tried per target, those that the estimate favours.
    """
    chosen: list[Trial] = []
    found: dict[int, list[Return]] = {target: [] for target in targets}
    with tqdm(total=2 * len(targets), desc="bring back", disable=None if progress else True) as bar:
        for target in targets:
            chosen += trials(estimated_change(pruned, ids, drop_step, target), target, most)
            bar.update()
        for trial, loss in verify(pruned, ids, drop_step, chosen):
            found[trial.target].append(Return(trial.token, trial.layer, loss))
            bar.update(len(targets) / len(chosen))
    return {
        target: tuple(sorted(returns, key=lambda back: back.loss))
        for target, returns in found.items()
    }
