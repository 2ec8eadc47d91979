"""Figures in one style: PNG and SVG files, and SVG that follows a page's light or dark colours."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# told apart by people who confuse red and green, and seen on white and on black
COLOURS = ("#64748b", "#2f7ed8", "#e08a00", "#1a9e77", "#c2549a", "#d5492c", "#7a5fd0", "#8c8c00")
MARKERS = "osD^vPX*"
INK, MUTED, GRID = "#1e293c", "#64748c", "#e2e8f1"
# what stands for each of them in a page: its style sheet says how it looks by day and by night
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}
LEGEND: Any = {"frameon": False, "fontsize": 8.5, "labelcolor": INK}
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "svg.fonttype": "none",
}


def need_matplotlib() -> None:
    """To be asked before the work begins, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PruneError(
            "figures need the package matplotlib; pip install 'kvprune[plot]', or leave --out away"
        ) from error


def panels(titles: Sequence[str], width: float = 4.4, height: float = 3.3) -> tuple[Figure, Any]:
    """A figure with one named panel a title, at most three in a row and four as two by two."""
    need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    columns = 2 if len(titles) == 4 else min(3, len(titles))
    rows = math.ceil(len(titles) / columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure((width * columns, height * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, title in zip(axes, titles, strict=False):
            axis.set_title(plain(title))
        for spare in axes[len(titles) :]:
            spare.set_axis_off()
    return figure, axes[: len(titles)]


def plain(text: str) -> str:
    """Text that matplotlib does not read as a formula."""
    return str(text).replace("$", r"\$")


def line(axis: Axes, number: int, x: Sequence[float], y: Sequence[float], name: str) -> None:
    """One series, with the colour and the marker of its number."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    # a name that starts with _ would be left out of the legend
    axis.plot(x, y, color=colour, marker=marker, label=plain(name).lstrip("_") or "?")


def level(axis: Axes, y: float) -> None:
    """A dashed line across, behind all else: where the dense model is."""
    axis.axhline(y, color=COLOURS[0], linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)


def legend(axis: Axes, order: int = 1, **where: Any) -> None:
    """The names of the series; order −1: the last at the top, as bars are stacked."""
    handles, names = axis.get_legend_handles_labels()
    if handles:
        axis.legend(handles[::order], names[::order], **LEGEND, **where)


def legend_above(figure: Figure, axis: Axes) -> None:
    """The names of one panel's series above all panels, where they hide nothing."""
    handles, names = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside upper left", ncols=len(names), **LEGEND)


def heading(figure: Figure, text: str) -> None:
    figure.suptitle(plain(text), fontsize=11, color=INK)


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write stem.png and stem.svg; returns the two."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for file in files:
        write_atomically(file, _drawn(figure, file.suffix[1:]))
    return files


def inline(figure: Figure, name: str) -> str:
    """An <svg> for the middle of a page, whose ink and grid are the page's own."""
    text = _drawn(figure, "svg", salt=name).decode()
    text = text[text.index("<svg") :]
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    # ids are made from the salt; metadata says when and by what it was drawn
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    return re.sub(r'id="(figure|axes|patch|line2d|text|legend|matplotlib)\w*\.?\w*"', "", text)


def _drawn(figure: Figure, kind: str, salt: str = "kvprune") -> bytes:
    import matplotlib

    out = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(out, format=kind, dpi=160, metadata=metadata, transparent=kind == "svg")
    return out.getvalue()
