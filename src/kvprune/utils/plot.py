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

# distinct for people who confuse red and green, and visible on white and on black
COLOURS = ("#64748b", "#2f7ed8", "#e08a00", "#1a9e77", "#c2549a", "#d5492c", "#7a5fd0", "#8c8c00")
MARKERS = "osD^vPX*"
INK, MUTED, GRID = "#1e293c", "#64748c", "#e2e8f1"
# what replaces them in a page, whose style sheet has a light and a dark value for each
VARIABLES = {INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)"}
PALE = "#dbe3ee"  # an area in the background
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
    """Raise if it is missing; call this before the work begins, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PruneError(
            "figures need the package matplotlib; pip install 'kvprune[plot]'"
        ) from error


def panels(
    titles: Sequence[str], width: float = 4.4, height: float = 3.3, columns: int | None = None
) -> tuple[Figure, list[Axes]]:
    """A figure with one panel per title, at most three in a row and four as two by two."""
    need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    columns = columns or (2 if len(titles) == 4 else min(3, len(titles)))
    rows = math.ceil(len(titles) / columns)
    with matplotlib.rc_context(STYLE):
        # not through pyplot, which keeps every figure until it is closed
        figure = Figure((width * columns, height * rows), layout="constrained")
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, title in zip(axes, titles, strict=False):
            axis.set_title(plain(title))
        for spare in axes[len(titles) :]:
            spare.set_axis_off()
    return figure, axes[: len(titles)]


def panel(width: float = 5.4, height: float = 3.3) -> tuple[Figure, Axes]:
    """A figure with a single panel, without a title."""
    figure, (axis,) = panels([""], width, height)
    return figure, axis


def shade(number: int, count: int) -> Any:
    """The colour of the number-th of `count` series that have an order: layers, sizes, γ."""
    import matplotlib

    return matplotlib.colormaps["viridis"](0.9 * number / max(count - 1, 1))


def plain(text: str) -> str:
    """Text that matplotlib does not read as a formula."""
    return str(text).replace("$", r"\$")


def line(
    axis: Axes, number: int, x: Sequence[float], y: Sequence[float], name: str, **look: Any
) -> None:
    """One series, with the colour and the marker of its number; `look` overrides them."""
    colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
    # a name that starts with _ would be left out of the legend
    label = plain(name).lstrip("_") or "?"
    axis.plot(x, y, **{"color": colour, "marker": marker, "label": label, **look})


def level(axis: Axes, y: float) -> None:
    """A dashed line across, behind everything else: where the dense model is."""
    axis.axhline(y, color=COLOURS[0], linestyle=(0, (4, 3)), linewidth=1.1, zorder=1)


def legend(axis: Axes, order: int = 1, **where: Any) -> None:
    """The names of the series; order −1: the last at the top, as bars are stacked."""
    handles, names = axis.get_legend_handles_labels()
    if handles:
        axis.legend(handles[::order], names[::order], **{**LEGEND, **where})


def legend_above(figure: Figure, axis: Axes) -> None:
    """The names of one panel's series above all panels, where they hide nothing."""
    handles, names = axis.get_legend_handles_labels()
    if handles:
        figure.legend(handles, names, loc="outside upper left", ncols=len(names), **LEGEND)


def heading(figure: Figure, text: str) -> None:
    figure.suptitle(plain(text), fontsize=11, color=INK)


def save(figure: Figure, stem: Path, kinds: Sequence[str] = ("png", "svg")) -> list[Path]:
    """Write stem.png and stem.svg; returns them. The same numbers give the same bytes."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [stem.with_name(f"{stem.name}.{kind}") for kind in kinds]
    for file in files:
        write_atomically(file, _drawn(figure, file.suffix[1:]))
    return files


def inline(figure: Figure, name: str) -> str:
    """An <svg> element for a page, with the page's own colours for ink and grid."""
    text = _drawn(figure, "svg", salt=name, transparent=True).decode()
    text = text[text.index("<svg") :]
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, variable)
    # ids are derived from the salt; metadata holds the date and the version of matplotlib
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(width|height)="[\d.]+pt"', "", text, count=2)
    return re.sub(r'id="(figure|axes|patch|line2d|text|legend|matplotlib)\w*\.?\w*"', "", text)


def _drawn(figure: Figure, kind: str, salt: str = "kvprune", transparent: bool = False) -> bytes:
    import matplotlib

    out = io.BytesIO()
    metadata = {"Date": None} if kind == "svg" else None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(out, format=kind, dpi=160, metadata=metadata, transparent=transparent)
    return out.getvalue()
