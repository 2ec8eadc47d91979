"""Tokens a second and the time of a step, by context and batch: the paper's Fig. throughput.

Every side of a setting decodes in turn, a few tokens at a time; a ratio compares two sides within
a round. "realistic" rows hold what the model itself decided on real text, "ideal" ones are all
alike (Fig. ideal_throughput).
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
from kvprune.evaluate.throughput import sides
from kvprune.evaluate.throughput.decoding import stepper
from kvprune.evaluate.throughput.sides import Loaded, Side
from kvprune.evaluate.throughput.timing import interleave, ratios, spread
from kvprune.integration.host import max_positions

Track = Callable[[list[Row]], Iterable[Row]]
REALISTIC, IDEAL = "realistic", "ideal"


@dataclass(frozen=True)
class Sweep:
    """Which settings are measured, and how long."""

    contexts: Annotated[tuple[int, ...], "tokens read before decoding"] = (256, 512, 1000)
    batches: Annotated[tuple[int, ...], "rows decoded together"] = (1, 8, 32)
    sparsities: Annotated[tuple[float, ...], "of ideal rows"] = (0.8,)
    baselines: Annotated[tuple[str, ...], "beside pruning, with ideal rows"] = ()
    static: Annotated[bool, "a StaticCache as well"] = False
    memory: Annotated[int | None, "bytes that weights and cache of one side may take"] = None
    rank: Annotated[int, "of interaction keys where no adapter says"] = 64
    steps: Annotated[int, "tokens in a timed call"] = 4
    repeats: Annotated[int, "rounds"] = 5

    @property
    def room(self) -> int:
        """Tokens that are decoded in all, warm-up included."""
        return self.steps * (self.repeats + 1)


def throughput(
    loaded: Loaded, sweep: Sweep, points: Points, track: Track | None = None
) -> list[Row]:
    """Measure what `points` does not hold yet; all its rows.

    With `sweep.memory`, a side is left out where its weights and its cache, as large a row as at
    its smallest batch, would take more. The sides of a setting lie in memory together.
    """
    _check(loaded, sweep)
    for setting in (track or iter)(settings(loaded, sweep)):
        points.measure(setting, lambda s=setting: _rows(loaded, sweep, points.rows, s))  # type: ignore[misc]
    return points.rows


def default_contexts(loaded: Loaded, room: int, most: int = 1000) -> tuple[int, ...]:
    """An eighth, a quarter, a half and all of what the model has positions for, at most 1,000."""
    longest = min(most, (max_positions(loaded.plain) or most + room) - room)
    return tuple(sorted({max(1, longest // part) for part in (8, 4, 2, 1)}))


def settings(loaded: Loaded, sweep: Sweep) -> list[Row]:
    """Context by context, the small batches first."""
    kinds: list[Row] = [{"rows": IDEAL, "at": sparsity} for sparsity in sweep.sparsities]
    if loaded.pruned is not None:
        kinds.insert(0, {"rows": REALISTIC})
    return [
        {**kind, "context": context, "batch": batch}
        for context in sorted(sweep.contexts)
        for kind in kinds
        for batch in sorted(sweep.batches)
    ]


def _rows(loaded: Loaded, sweep: Sweep, measured: list[Row], setting: Row) -> Iterator[Row]:
    context, batch = setting["context"], setting["batch"]
    if setting["rows"] == REALISTIC:
        competing = sides.realistic(loaded, sweep.static)
    else:
        options = (sweep.baselines, sweep.static, sweep.rank)
        competing = sides.ideal(loaded, context, setting["at"], *options)
    if sweep.memory is not None:
        competing = [s for s in competing if _fits(s, loaded, sweep.memory, measured, setting)]
    caches = {side.name: side.make(batch, context, sweep.room) for side in competing}
    calls = {s.name: stepper(s.model, caches[s.name], batch, sweep.steps) for s in competing}
    seconds = interleave(sweep.repeats, calls)
    for side in competing:
        step = spread([s / sweep.steps for s in seconds[side.name]])
        yield {
            "side": side.name,
            "method": side.method,
            "sparsity": _sparsity(caches[side.name]),
            "seconds_step": step.median,
            "seconds_step_low": step.low,
            "seconds_step_high": step.high,
            "tokens_per_second": batch / step.median,
            "cache_bytes": nbytes(caches[side.name]),
            **_against_dense(seconds, side.name),
        }
    del caches, calls, competing
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
    return 1 - float(cache.kept.float().mean()) / cache.seen


def _fits(side: Side, loaded: Loaded, memory: int, measured: list[Row], setting: Row) -> bool:
    own = [
        row
        for row in measured
        if (_kind(row), row["context"], row["side"])
        == (_kind(setting), setting["context"], side.name)
    ]
    if not own:
        return True  # the smallest batch tells how large a row is
    smallest = min(own, key=lambda row: row["batch"])
    a_row = smallest["cache_bytes"] / smallest["batch"]
    return loaded.weight_bytes + a_row * setting["batch"] <= memory


def _kind(row: Row) -> tuple[Any, ...]:
    return row["rows"], row.get("at")


def _check(loaded: Loaded, sweep: Sweep) -> None:
    for name in ("contexts", "batches", "steps", "repeats"):
        value = getattr(sweep, name)
        if min(value if isinstance(value, tuple) else (value,)) < 1:
            raise PruneError(f"{name}={value} must be 1 or more")
    limit = max_positions(loaded.plain)
    longest = max(sweep.contexts) + sweep.room
    if limit is not None and longest > limit:
        raise PruneError(
            f"a context of {max(sweep.contexts)} and {sweep.room} tokens to decode need {longest} "
            f"positions, but the model has {limit}; lower --context, or --steps and --repeats"
        )
    if not sweep.sparsities and loaded.pruned is None:
        raise PruneError("there is nothing to set beside dense; pass --adapter or --sparsity")
