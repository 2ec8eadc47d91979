"""The right half of the paper's Fig. throughput: tokens/s and the time of a step by context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvprune.evaluate.compare.results import best
from kvprune.utils.plot import heading, legend, line, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: list[dict[str, Any]], model: str) -> Figure:
    """Tokens/s at each side's best batch; a step at the largest batch that all sides ran."""
    batch = min(_largest(rows, name) for name in map(series, rows))
    figure, (speed, step) = panels(
        ["Tokens/s, each at its best batch", f"Time of a step, batch {batch}"], width=5.4
    )
    same = [row for row in rows if row["batch"] == batch]
    _lines(speed, best(rows), "tokens_per_second", 1)
    _lines(step, same, "seconds_step", 1000)
    speed.set(xlabel="context, tokens", ylabel="tokens/s", ylim=(0, None))
    step.set(xlabel="context, tokens", ylabel="ms", ylim=(0, None))
    legend(step, loc="center left", bbox_to_anchor=(1, 0.5))
    heading(figure, model)
    return figure


def series(row: dict[str, Any]) -> str:
    """A name for the line that a row belongs to."""
    if row["method"] == "dense":
        return str(row["side"])
    if row["rows"] == "realistic":
        return f"{row['side']}, own decisions"
    return f"{row['side']}, ideal {row['at']:.0%}"


def _largest(rows: list[dict[str, Any]], name: str) -> int:
    return max(row["batch"] for row in rows if series(row) == name)


def _lines(axis: Any, rows: list[dict[str, Any]], value: str, scale: float) -> None:
    for number, name in enumerate(dict.fromkeys(map(series, rows))):
        # dense runs beside each of the others: the mean of what it did there
        found: dict[int, list[float]] = {}
        for row in rows:
            if series(row) == name:
                found.setdefault(row["context"], []).append(row[value] * scale)
        x = sorted(found)
        line(axis, number, x, [sum(found[n]) / len(found[n]) for n in x], name)
