"""Against sparsity: perplexity, accuracy, bytes and tokens/s of several models in one figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvprune.evaluate.compare.results import Entry, Result, summary
from kvprune.utils.plot import legend, level, line, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Point = tuple[float, float]
Series = dict[str, list[Point]]


def draw(found: list[Entry], results: list[Result]) -> Figure | None:
    """A panel for each thing that was measured at two sparsities or more; None if nothing was."""
    names = namer(found)
    shown = {
        "Perplexity": (perplexities(found, names), "perplexity"),
        "Zero-shot accuracy": (accuracies(found, names), "mean accuracy, %"),
        "Cache against dense": (bytes_held(found, results, names), "bytes / dense bytes"),
        "Speed against dense": (speeds(found, results, names), "tokens/s / dense tokens/s"),
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


def namer(found: list[Entry]) -> Any:
    """What a series is called: its method, and its base model where there are several."""
    several = len({entry.base for entry in found}) > 1
    return lambda base, method: f"{base}, {method}" if several else method


def perplexities(found: list[Entry], names: Any) -> Series:
    return _gather(
        (names(e.base, e.method), row["sparsity"], row["perplexity"])
        for e in found
        if (row := e.overall) is not None
    )


def accuracies(found: list[Entry], names: Any) -> Series:
    return _gather(
        (names(e.base, e.method), row["sparsity"], 100 * row["accuracy"])
        for e in found
        if (row := e.accuracy) is not None
    )


def bytes_held(found: list[Entry], results: list[Result], names: Any) -> Series:
    """Measured on real caches, and by formula at the largest context."""
    measured = [
        (names(e.base, e.method), row["sparsity"], row["cache_ratio"])
        for e in found
        if (row := summary(e, found))["cache_ratio"] is not None
    ]
    for result in (r for r in results if r.kind == "cost"):
        largest = max(row["context"] for row in result.rows)
        measured += [
            ("by formula", row["sparsity"], row["cache_ratio"])
            for row in result.rows
            if row["context"] == largest and row["method"] != "dense"
        ]
    return _gather(measured)


def speeds(found: list[Entry], results: list[Result], names: Any) -> Series:
    """At the same batch as dense: the models' own decisions, and ideal rows at the best batch."""
    measured = [
        (names(e.base, e.method), row["sparsity"], row["ratio"])
        for e in found
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
