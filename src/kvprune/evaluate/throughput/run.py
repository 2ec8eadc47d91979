"""Tokens per second and the time of a step, by context and batch: the paper's Fig. throughput.

The contestants of a setting decode in turn, a few tokens at a time; a ratio compares two of them
within a round. "realistic" rows hold what the model itself decided on real text; "ideal" rows all
hold the same number of tokens (Fig. ideal_throughput).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from kvprune.cache.nbytes import nbytes
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.evaluate.points import Points, Row
from kvprune.evaluate.throughput.contestants import Contestant, ideal, realistic
from kvprune.evaluate.throughput.decoding import stepper
from kvprune.evaluate.throughput.models import ModelPair
from kvprune.evaluate.throughput.timing import interleave, ratios, spread
from kvprune.integration.host import max_positions

Track = Callable[[list[Row]], Iterable[Row]]
REALISTIC, IDEAL = "realistic", "ideal"


@dataclass(frozen=True)
class Sweep:
    """Which settings are measured, and for how long."""

    contexts: Annotated[tuple[int, ...], "tokens read before decoding"] = (256, 512, 1000)
    batches: Annotated[tuple[int, ...], "rows decoded together"] = (1, 8, 32)
    sparsities: Annotated[tuple[float, ...], "of ideal rows"] = (0.8,)
    baselines: Annotated[tuple[str, ...], "to compare with, on ideal rows"] = ()
    static: Annotated[bool, "also measure a StaticCache"] = False
    memory: Annotated[int | None, "limit in bytes for the weights and cache of one model"] = None
    rank: Annotated[int, "of interaction keys if there is no adapter"] = 64
    steps: Annotated[int, "tokens per timed call"] = 4
    repeats: Annotated[int, "rounds"] = 5

    @property
    def room(self) -> int:
        """Tokens decoded in total, warm-up included."""
        return self.steps * (self.repeats + 1)


def throughput(
    models: ModelPair, sweep: Sweep, points: Points, track: Track | None = None
) -> list[Row]:
    """Measure the settings that `points` does not hold yet; returns all its rows.

    With `sweep.memory`, a contestant is left out where its weights and its cache (as large per row
    as at its smallest batch) would exceed it. All caches of a setting are in memory together.
    """
    _check(models, sweep)
    for setting in (track or iter)(settings(models, sweep)):
        points.measure(setting, lambda s=setting: _rows(models, sweep, points.rows, s))  # type: ignore[misc]
    return points.rows


def default_contexts(models: ModelPair, room: int, most: int = 1000) -> tuple[int, ...]:
    """An eighth, a quarter, a half and all of the model's positions, at most 1,000."""
    longest = min(most, (max_positions(models.dense) or most + room) - room)
    return tuple(sorted({max(1, longest // part) for part in (8, 4, 2, 1)}))


def settings(models: ModelPair, sweep: Sweep) -> list[Row]:
    """Context by context, small batches first."""
    kinds: list[Row] = [{"rows": IDEAL, "at": sparsity} for sparsity in sweep.sparsities]
    if models.pruned is not None:
        kinds.insert(0, {"rows": REALISTIC})
    return [
        {**kind, "context": context, "batch": batch}
        for context in sorted(sweep.contexts)
        for kind in kinds
        for batch in sorted(sweep.batches)
    ]


def _rows(models: ModelPair, sweep: Sweep, measured: list[Row], setting: Row) -> Iterator[Row]:
    context, batch = setting["context"], setting["batch"]
    if setting["rows"] == REALISTIC:
        contestants = realistic(models, sweep.static)
    else:
        options = (sweep.baselines, sweep.static, sweep.rank)
        contestants = ideal(models, context, setting["at"], *options)
    if sweep.memory is not None:
        contestants = [c for c in contestants if _fits(c, models, sweep.memory, measured, setting)]
    caches = {c.name: c.cache(batch, context, sweep.room) for c in contestants}
    calls = {c.name: stepper(c.model, caches[c.name], batch, sweep.steps) for c in contestants}
    seconds = interleave(sweep.repeats, calls)
    for contestant in contestants:
        name = contestant.name
        step = spread([s / sweep.steps for s in seconds[name]])
        yield {
            "side": name,
            "method": contestant.method,
            "sparsity": _sparsity(caches[name]),
            "seconds_step": step.median,
            "seconds_step_low": step.low,
            "seconds_step_high": step.high,
            "tokens_per_second": batch / step.median,
            "cache_bytes": nbytes(caches[name]),
            **_against_dense(seconds, name),
        }
    del caches, calls, contestants
    gc.collect()


def _against_dense(seconds: dict[str, list[float]], name: str) -> Row:
    """How many times as fast as dense at the same batch, round by round."""
    if "dense" not in seconds:
        return {"ratio": None, "ratio_low": None, "ratio_high": None}
    share = spread(ratios(seconds["dense"], seconds[name]))
    return {"ratio": share.median, "ratio_low": share.low, "ratio_high": share.high}


def _sparsity(cache: Any) -> float:
    """The share of the tokens read that the cache no longer holds."""
    if not isinstance(cache, PrunedCache):
        return 0.0
    return 1 - float((cache.kept / cache.tokens).mean())


def _fits(
    contestant: Contestant, models: ModelPair, memory: int, measured: list[Row], setting: Row
) -> bool:
    earlier = [
        row
        for row in measured
        if (_kind(row), row["context"], row["side"])
        == (_kind(setting), setting["context"], contestant.name)
    ]
    if not earlier:
        return True  # the smallest batch is always measured
    smallest = min(earlier, key=lambda row: row["batch"])
    row_bytes: float = smallest["cache_bytes"] / smallest["batch"]
    return bool(models.weight_bytes + row_bytes * setting["batch"] <= memory)


def _kind(row: Row) -> tuple[Any, ...]:
    return row["rows"], row.get("at")


def _check(models: ModelPair, sweep: Sweep) -> None:
    for name in ("contexts", "batches", "steps", "repeats"):
        value = getattr(sweep, name)
        if min(value if isinstance(value, tuple) else (value,)) < 1:
            raise PruneError(f"{name}={value} must be 1 or more")
    limit = max_positions(models.dense)
    longest = max(sweep.contexts) + sweep.room
    if limit is not None and longest > limit:
        raise PruneError(
            f"a context of {max(sweep.contexts)} and {sweep.room} tokens to decode need {longest} "
            f"positions, but the model has {limit}; lower --context, or --steps and --repeats"
        )
    if not sweep.sparsities and models.pruned is None:
        raise PruneError("there is nothing to compare with dense; pass --adapter or --sparsity")
