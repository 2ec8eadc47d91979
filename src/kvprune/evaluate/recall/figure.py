"""Scores by context, one panel per task, and the cost of pruning where text repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvprune.evaluate.points import Row
from kvprune.evaluate.recall.measure import ALL
from kvprune.evaluate.recall.repeats import DISTANCES, name_of
from kvprune.utils.plot import heading, legend_above, level, line, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(rows: Sequence[Row], repeated: Sequence[Row], name: str) -> Figure:
    """Bars are intervals of 95 %."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    # the dense model has the first colour, as everywhere
    sides = ["dense", *dict.fromkeys(row["side"] for row in [*rows, *repeated])]
    sides = list(dict.fromkeys(sides))
    against = [row for row in repeated if row["ratio"] is not None]
    titles = [*tasks, *(["repeats"] if against else [])]
    figure, axes = panels(titles or ["recall"])
    for task, axis in zip(tasks, axes, strict=False):
        _scores(axis, [row for row in rows if (row["task"], row["depth"]) == (task, ALL)], sides)
    if against:
        _repeats(axes[len(tasks)], against, sides)
    heading(figure, name)
    legend_above(figure, axes[0])
    return figure


def _scores(axis: Axes, rows: Sequence[Row], sides: Sequence[str]) -> None:
    for number, side in enumerate(sides):
        own = sorted((row for row in rows if row["side"] == side), key=lambda row: row["context"])
        if own:
            _with_bars(axis, number, [row["context"] for row in own], own, side, "score", 100)
    contexts = sorted({row["context"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(contexts, [str(n) for n in contexts])
    axis.minorticks_off()
    axis.set(xlabel="tokens of the prompt", ylabel="right, %", ylim=(-4, 104))


def _repeats(axis: Axes, rows: Sequence[Row], sides: Sequence[str]) -> None:
    """At the longest context, by distance."""
    longest = max(row["context"] for row in rows)
    seen = {row["distance"] for row in rows if row["context"] == longest}
    names = [name for name in map(name_of, DISTANCES) if name in seen]
    level(axis, 1)
    for number, side in enumerate(sides):
        own = [
            row
            for name in names
            for row in rows
            if (row["side"], row["context"], row["matched"], row["distance"])
            == (side, longest, "all", name)
        ]
        if own:
            places = [names.index(row["distance"]) for row in own]
            _with_bars(axis, number, places, own, side, "ratio", 1)
    axis.set_xticks(range(len(names)), names)
    axis.set(xlabel=f"tokens back, of {longest}", ylabel="perplexity / dense")


def _with_bars(
    axis: Axes, number: int, x: Any, rows: Sequence[Row], name: str, key: str, scale: float
) -> None:
    line(axis, number, x, [scale * row[key] for row in rows], name)
    axis.vlines(
        x, [scale * row["low"] for row in rows], [scale * row["high"] for row in rows],
        color=axis.lines[-1].get_color(), linewidth=1, alpha=0.6,
    )  # fmt: skip
