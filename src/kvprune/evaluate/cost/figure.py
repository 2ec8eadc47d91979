"""The paper's Fig. flops_memory: FLOPs of a token by part, bytes of the cache by context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvprune.evaluate.cost.formulas import PARTS
from kvprune.utils.plot import COLOURS, heading, legend, line, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: list[dict[str, Any]]) -> Figure:
    """From the rows of `cost` for one model: bars at the largest context, lines at every one."""
    largest, batch = max(row["context"] for row in rows), rows[0]["batch"]
    rows = [row for row in rows if row["batch"] == batch]
    shown = "one row" if batch == 1 else f"{batch} rows"
    figure, (bars, lines) = panels(
        [
            f"FLOPs of one more token, context {largest:,}",
            f"Bytes of the cache, {shown}",
        ],
        width=5.2,
    )
    _stack(bars, [row for row in rows if row["context"] == largest])
    for number, side in enumerate(dict.fromkeys(map(_side, rows))):
        own = sorted((r for r in rows if _side(r) == side), key=lambda r: r["context"])
        mebibytes = [r["cache_bytes"] / 2**20 for r in own]
        line(lines, number, [r["context"] for r in own], mebibytes, side)
    lines.set(xlabel="context, tokens", ylabel="MiB", xlim=(0, None), ylim=(0, None))
    legend(lines)
    heading(figure, rows[0]["model"])
    return figure


def _stack(axis: Any, rows: list[dict[str, Any]]) -> None:
    names, base = [_side(row) for row in rows], [0.0] * len(rows)
    for number, part in enumerate(PARTS):
        heights = [row["flops"][part] / 1e6 for row in rows]
        # a look-up multiplies nothing: no colour for what has no height
        if any(heights):
            axis.bar(names, heights, bottom=base, color=COLOURS[number], label=part, width=0.62)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    axis.set(ylabel="million FLOPs")
    axis.grid(visible=False, axis="x")
    legend(axis, -1, loc="center left", bbox_to_anchor=(1, 0.5))


def _side(row: dict[str, Any]) -> str:
    return "dense" if row["method"] == "dense" else f"pruned {row['sparsity']:.0%}"
