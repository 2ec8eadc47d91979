"""Text that repeats itself: how well what was said before is predicted, by distance and length.

A window of plain text in which spans of several lengths are said again at several distances. A
token is a repeat if the tokens before it, and itself, stood in the window before; it is counted by
how many tokens before it have already been repeated, and by how far back they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from kvprune.evaluate.points import Points, Row
from kvprune.evaluate.reader import Reader, dropped_by
from kvprune.evaluate.recall.prompts import Haystack
from kvprune.utils.intervals import bootstrap

LENGTHS = (8, 24, 64)  # tokens of a span that is said again
MATCHED = ((4, 15), (16, 63), (64, None))  # repeated so far; fewer than 4 may be by chance
DISTANCES = ((1, 127), (128, 511), (512, 1023), (1024, None))
REST = "rest"


def repeating(ids: Sequence[int], random: Random) -> list[int]:
    """The text with about a quarter of it replaced by spans of what precedes them."""
    out = list(ids)
    T, done = len(out), len(out) // 8
    while True:
        length = min(random.choice(LENGTHS), T // 8)
        start = done + random.randrange(2 * length, 4 * length + 1)
        if start + length > T:
            return out
        # as often from near by as from far away
        distance = round(math.exp(random.uniform(math.log(length), math.log(start))))
        out[start : start + length] = out[start - distance : start - distance + length]
        done = start + length


def matches(ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """For each token, how many before it continue an earlier place that it continues, too: (T,).

    And the distance to that place, the nearest of the longest; 0 where the token is new.

        run[t, j] = run[t−1, j−1] + 1 if ids[t] = ids[j], else 0;  matched[t] = max_j run[t, j] − 1
    """
    tokens = np.asarray(ids)
    T = len(tokens)
    matched, distance = np.zeros(T, int), np.zeros(T, int)
    run = np.zeros(T, int)
    for t in range(T):
        run[1:] = run[:-1]
        run[0] = 0
        run = np.where((tokens == tokens[t]) & (np.arange(T) < t), run + 1, 0)
        longest = int(run.max())
        if longest:
            matched[t] = longest - 1
            distance[t] = t - int(np.flatnonzero(run == longest)[-1])
    return matched, distance


def measure_repeats(
    reader: Reader,
    side: str,
    haystack: Haystack,
    contexts: Sequence[int],
    samples: int,
    points: Points,
    seed: int = 0,
    about: Row | None = None,
    progress: bool = True,
) -> list[Row]:
    """Sums of losses by class of token, one row per window and class."""
    rows: list[Row] = []
    windows = [(context, sample) for context in contexts for sample in range(samples)]
    name = f"{side}, repeats"
    for context, sample in tqdm(windows, name, unit=" windows", disable=None if progress else True):
        setting = {"side": side, "task": "repeats", "context": context, "sample": sample,
                   **(about or {})}  # fmt: skip

        def measure(context: int = context, sample: int = sample) -> list[Row]:
            random = Random(f"repeats {context} {sample} {seed}")
            ids = repeating(haystack.window(context, random), random)
            losses, dropped = _losses(reader, torch.tensor([ids]))
            return list(_sums(ids, losses, dropped))

        rows += points.measure(setting, measure)
    return rows


def _losses(reader: Reader, ids: Tensor) -> tuple[np.ndarray, float]:
    """The loss of each token but the first (T − 1,), and the share dropped at the end."""
    cuts = reader.pruned is not None and reader.pruned.config.cuts_prompts
    parts = list(reader.read(ids, chunk=64 if cuts else None))
    logits = torch.cat(parts, 1)[0, :-1].float().cpu()
    losses = F.cross_entropy(logits, ids[0, 1:], reduction="none").double().numpy()
    if reader.drop_step is None:
        return losses, 0.0
    return losses, float(dropped_by(reader.drop_step)[..., -1].float().mean()) / (ids.shape[1] - 1)


def _sums(ids: Sequence[int], losses: np.ndarray, dropped: float) -> Iterator[Row]:
    matched, distance = matches(ids)
    matched, distance = matched[1:], distance[1:]
    classes: list[tuple[str, str, Any]] = [(REST, REST, matched < MATCHED[0][0])]
    for length in MATCHED:
        classes += [
            (name_of(length), name_of(far), _inside(matched, length) & _inside(distance, far))
            for far in DISTANCES
        ]
    for length_name, far_name, chosen in classes:
        if chosen.any():
            yield {
                "matched": length_name, "distance": far_name, "tokens": int(chosen.sum()),
                "loss": float(losses[chosen].sum()), "dropped": dropped,
            }  # fmt: skip


def summary(rows: Sequence[Row]) -> list[Row]:
    """Perplexity by class and over all repeats; / dense with an interval over windows."""
    dense = {_key(row): row["loss"] for row in rows if row["side"] == "dense"}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        kinds = {(row["matched"], row["distance"])}
        if row["matched"] != REST:
            kinds |= {("all", "all"), ("all", row["distance"]), (row["matched"], "all")}
        for kind in sorted(kinds):
            groups.setdefault((row["side"], row["context"], *kind), []).append(row)
    return [_mean(key, group, dense) for key, group in groups.items()]


def _mean(key: tuple[Any, ...], group: list[Row], dense: dict[tuple[Any, ...], float]) -> Row:
    side, context, matched, distance = key
    tokens = sum(row["tokens"] for row in group)
    windows: dict[int, list[float]] = {}  # tokens, loss, loss of dense
    for row in group:
        sums = windows.setdefault(row["sample"], [0.0, 0.0, 0.0])
        for i, value in enumerate((row["tokens"], row["loss"], dense.get(_key(row), math.nan))):
            sums[i] += value
    compared = side != "dense" and not any(math.isnan(w[2]) for w in windows.values())
    cases = list(windows.values())
    low, high = bootstrap(cases, _ratio) if compared else (None, None)
    return {
        "side": side, "context": context, "matched": matched, "distance": distance,
        "windows": len(windows), "tokens": tokens,
        "perplexity": math.exp(sum(row["loss"] for row in group) / tokens),
        "ratio": _ratio(cases) if compared else None, "low": low, "high": high,
        "sparsity": float(np.mean([row["dropped"] for row in group])),
    }  # fmt: skip


def _ratio(cases: Sequence[Sequence[float]]) -> float:
    """Perplexity / dense, over the tokens of several windows."""
    tokens, own, dense = (sum(column) for column in zip(*cases, strict=True))
    return math.exp((own - dense) / tokens)


def _key(row: Row) -> tuple[Any, ...]:
    return row["context"], row["sample"], row["matched"], row["distance"]


def _inside(values: np.ndarray, bounds: tuple[int, int | None]) -> np.ndarray:
    low, high = bounds
    return (values >= low) & (values <= (values.max() if high is None else high))


def name_of(bounds: tuple[int, int | None]) -> str:
    low, high = bounds
    return f"{low}+" if high is None else f"{low}-{high}"
