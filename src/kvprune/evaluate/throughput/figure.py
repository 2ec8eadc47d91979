"""The right half of the paper's Fig. throughput: tokens/s and the time of a step by context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvprune.evaluate.compare.results import best
from kvprune.utils.plot import heading, legend, line, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: list[dict[str, Any]], model: str) -> Figure:
    """Tokens/s at each one's best batch; a step at the largest batch that all of them ran."""
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
    largest: int = max(row["batch"] for row in rows if series(row) == name)
    return largest


def _lines(axis: Any, rows: list[dict[str, Any]], value: str, scale: float) -> None:
    for number, name in enumerate(dict.fromkeys(map(series, rows))):
        # dense is timed once with each of the others: draw its mean
        by_context: dict[int, list[float]] = {}
        for row in rows:
            if series(row) == name:
                by_context.setdefault(row["context"], []).append(row[value] * scale)
        x = sorted(by_context)
        line(axis, number, x, [sum(by_context[n]) / len(by_context[n]) for n in x], name)
