"""Perplexity and sparsity by context size, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprune.evaluate.perplexity.measure import AtContext
from kvprune.utils.plot import legend, line, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(rows: Sequence[AtContext], name: str) -> Figure:
    """With the dense model's perplexity, if it was measured."""
    sized = [row for row in rows if isinstance(row.context, int)]
    x = [int(row.context) for row in sized]
    figure, (left, right) = panels(["Perplexity", "Context pruned, %"])
    dense = [row.dense_perplexity for row in sized if row.dense_perplexity is not None]
    if len(dense) == len(x):
        line(left, 0, x, dense, "dense")
    line(left, 1, x, [row.perplexity for row in sized], name)
    left.set_yscale("log", base=2)
    left.yaxis.set_major_formatter("{x:g}")
    line(right, 1, x, [100 * row.sparsity for row in sized], name)
    right.set_ylim(-2, 102)
    for axis in (left, right):
        axis.set_xlabel("context, tokens")
        axis.set_xscale("log", base=2)
        axis.set_xticks(x, [str(n) for n in x])
    legend(left)
    return figure
