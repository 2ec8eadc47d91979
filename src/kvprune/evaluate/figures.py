"""Figures as PNG and SVG, written whole, the same bytes for the same numbers."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.errors import PruneError
from kvprune.files import write_whole

if TYPE_CHECKING:
    from kvprune.evaluate.perplexity import AtContext

DENSE, PRUNED = "#64748b", "#2563eb"


def need_matplotlib() -> None:
    """Before the work begins, not after it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PruneError(
            "figures need the package matplotlib; pip install 'kvprune[plot]', or leave --out away"
        ) from error


@contextmanager
def figure(stem: Path, panels: int) -> Iterator[list[Any]]:
    """Axes side by side; at the end saved as stem.png and stem.svg."""
    need_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    # ids in an SVG are random and its date is today's, unless told otherwise
    with matplotlib.rc_context({"svg.hashsalt": "kvprune", "svg.fonttype": "none"}):
        made = Figure(figsize=(4.5 * panels, 3.2), layout="constrained")
        yield list(made.subplots(1, panels, squeeze=False)[0])
        for kind, about in (("png", {"Software": None}), ("svg", {"Date": None})):
            data = io.BytesIO()
            made.savefig(data, format=kind, dpi=150, metadata=about)
            write_whole(stem.with_suffix(f".{kind}"), data.getvalue())


def plot_perplexity(rows: Sequence[AtContext], stem: Path, title: str = "") -> None:
    """By context size: perplexity, the dense model's beside it if measured, and sparsity."""
    sized = [row for row in rows if isinstance(row.context, int)]
    x = [row.context for row in sized]
    with figure(stem, panels=2) as (left, right):
        if all(row.dense_perplexity is not None for row in sized):
            dense = [row.dense_perplexity for row in sized]
            left.plot(x, dense, "o--", color=DENSE, label="dense")
        left.plot(x, [row.perplexity for row in sized], "o-", color=PRUNED, label=title or None)
        left.set_ylabel("perplexity")
        left.set_yscale("log", base=2)
        left.yaxis.set_major_formatter("{x:g}")
        right.plot(x, [100 * row.sparsity for row in sized], "o-", color=PRUNED)
        right.set_ylabel("context pruned, %")
        right.set_ylim(-2, 102)
        for axes in (left, right):
            axes.set_xlabel("context, tokens")
            axes.set_xscale("log", base=2)
            axes.set_xticks(x, [str(n) for n in x])
            axes.grid(alpha=0.3)
        if left.get_legend_handles_labels()[1]:
            left.legend()
