"""Against sparsity: perplexity, accuracy, bytes and tokens/s of several models in one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvprune.evaluate.compare.results import Entry, Result, summary
from kvprune.utils.plot import legend, level, line, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]
Series = dict[str, list[Point]]


def draw(models: list[Entry], results: list[Result]) -> Figure | None:
    """One panel per metric measured at two or more sparsities; None if there is none."""
    names = namer(models)
    shown = {
        "Perplexity": (perplexities(models, names), "perplexity"),
        "Zero-shot accuracy": (accuracies(models, names), "mean accuracy, %"),
        "Cache against dense": (bytes_held(models, results, names), "bytes / dense bytes"),
        "Speed against dense": (speeds(models, results, names), "tokens/s / dense tokens/s"),
    }
    shown = {title: (s, unit) for title, (s, unit) in shown.items() if _count(s) > 1}
    if not shown:
        return None
    figure, axes = panels(list(shown))
    # the same colour for the same series in every panel
    order = list(dict.fromkeys(name for series, _ in shown.values() for name in series))
    for axis, (series, unit) in zip(axes, shown.values(), strict=True):
        for name, points in series.items():
            points = sorted(points)
            x = [100 * sparsity for sparsity, _ in points]
            line(axis, order.index(name), x, [y for _, y in points], name)
            if name.endswith("dense") and len(points) == 1:
                level(axis, points[0][1])
        axis.set(xlabel="context pruned, %", ylabel=unit)
        axis.margins(x=0.06, y=0.12)
        legend(axis)
    return figure


def namer(models: list[Entry]) -> Any:
    """The name of a series: its method, and its base model if there are several."""
    several = len({entry.base for entry in models}) > 1
    return lambda base, method: f"{base}, {method}" if several else method


def perplexities(models: list[Entry], names: Any) -> Series:
    return _gather(
        (names(e.base, e.method), row["sparsity"], row["perplexity"])
        for e in models
        if (row := e.overall) is not None
    )


def accuracies(models: list[Entry], names: Any) -> Series:
    return _gather(
        (names(e.base, e.method), row["sparsity"], 100 * row["accuracy"])
        for e in models
        if (row := e.accuracy) is not None
    )


def bytes_held(models: list[Entry], results: list[Result], names: Any) -> Series:
    """Measured on real caches, and by formula at the largest context."""
    measured = [
        (names(e.base, e.method), row["sparsity"], row["cache_ratio"])
        for e in models
        if (row := summary(e, models))["cache_ratio"] is not None
    ]
    for result in (r for r in results if r.kind == "cost"):
        largest = max(row["context"] for row in result.rows)
        measured += [
            ("by formula", row["sparsity"], row["cache_ratio"])
            for row in result.rows
            if row["context"] == largest and row["method"] != "dense"
        ]
    return _gather(measured)


def speeds(models: list[Entry], results: list[Result], names: Any) -> Series:
    """At the same batch as dense: the models' own decisions, and ideal rows at the best batch."""
    measured = [
        (names(e.base, e.method), row["sparsity"], row["ratio"])
        for e in models
        if (row := e.speed) is not None and row["ratio"] is not None
    ]
    for result in (r for r in results if r.kind == "throughput"):
        rows = [r for r in result.rows if r["rows"] == "ideal" and r["ratio"] is not None]
        rows = [r for r in rows if r["method"] != "dense"]
        largest = max((r["context"] for r in rows), default=0)
        fastest: dict[tuple[str, float], dict[str, Any]] = {}
        for row in (r for r in rows if r["context"] == largest):
            key = (row["side"], row["at"])
            if row["ratio"] > fastest.get(key, {"ratio": 0})["ratio"]:
                fastest[key] = row
        measured += [
            (f"{side}, ideal rows", r["sparsity"], r["ratio"]) for (side, _), r in fastest.items()
        ]
    return _gather(measured)


def _gather(points: Any) -> Series:
    series: Series = {}
    for name, sparsity, value in points:
        series.setdefault(name, []).append((sparsity, value))
    return series


def _count(series: Series) -> int:
    return sum(map(len, series.values()))
