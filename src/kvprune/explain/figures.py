"""The paper's figures on interpretability, drawn from a study. Each can be drawn alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.explain.corpus_study import Study
from kvprune.explain.statistics import Statistics
from kvprune.explain.trace import Trace
from kvprune.utils import plot
from kvprune.utils.plot import COLOURS, INK, MUTED, PALE, legend, panel, panels, shade

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACCENT = COLOURS[1]


def save(study: Study, folder: str | Path, prefix: str = "forgetting") -> list[Path]:
    """Write every figure as SVG; the same numbers give the same bytes."""
    stems = {Path(folder) / f"{prefix}_{name}": figure for name, figure in draw(study).items()}
    return [file for stem, figure in stems.items() for file in plot.save(figure, stem, ("svg",))]


def draw(study: Study) -> dict[str, Figure]:
    """All figures by name."""
    return {
        "speech": kept_by_speech(study.statistics),
        "droppers": droppers(study.statistics),
        "positions": by_position(study.statistics),
        "lifetimes": lifetimes(study.statistics),
        "keys": nearest_keys(study),
        "switch": across_switch(study),
        "masks": masks(study.switch_trace, study.switch.starts),
    }


def kept_by_speech(counted: Statistics) -> Figure:
    """Fig. interpretability, bottom left: how likely a token stays, by part of speech."""
    kept = counted.kept_by_speech or counted.kept_by_kind
    figure, axes = panel(5.4, 0.26 * len(kept) + 1.1)
    names = list(kept)[::-1]
    axes.barh(
        names, [100 * kept[name].share for name in names], color=ACCENT, alpha=0.55, height=0.65
    )
    for y, name in enumerate(names):
        axes.plot([100 * s for s in kept[name].by_layer], [y] * len(kept[name].by_layer), "|",
                  color=INK, markersize=5, alpha=0.6)  # fmt: skip
    axes.set_xlabel("later tokens that still see it, % (ticks: single layers)")
    axes.grid(visible=False, axis="y")
    return figure


def droppers(counted: Statistics) -> Figure:
    """Fig. interpretability, bottom middle: which tokens cause drops, by layer."""
    rows = counted.droppers_by_kind
    busy = [i for i, drops in enumerate(counted.drops_by_layer) if drops]
    names = [f"layer {counted.layers[i]}" for i in busy] + ["all drops", "all tokens"]
    figure, axes = panel(6.4, max(3.2, 0.2 * len(names) + 1))
    left = np.zeros(len(names))
    for number, (name, row) in enumerate(rows.items()):
        shares = [row.by_layer[i] for i in busy] + [row.share, row.of_tokens]
        widths = 100 * np.array(shares)
        axes.barh(names[::-1], widths[::-1], left=left[::-1], label=name, height=0.7,
                  color=shade(number, len(rows)))  # fmt: skip
        left += widths
    axes.set_xlabel("% of drops, by the kind of token that caused them")
    axes.grid(visible=False, axis="y")
    legend(axes, ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    return figure


def by_position(counted: Statistics) -> Figure:
    """Fig. interpretability, bottom right: tokens dropped by their position, one line per layer."""
    figure, axes = panel()
    for layer, row in zip(counted.layers, counted.dropped_by_position, strict=True):
        axes.plot(counted.positions, [100 * share for share in row], lw=1.2, label=f"{layer}",
                  color=_shade(layer, counted.layers))  # fmt: skip
    axes.set(xlabel="position of the token", ylabel="dropped by the end, %", ylim=(0, 101))
    _layer_legend(axes, counted.layers)
    return figure


def lifetimes(counted: Statistics) -> Figure:
    """How many tokens later a token is dropped, one line per layer."""
    figure, axes = panel()
    edges = [2**b for b in range(len(counted.lifetimes[0]))]
    for layer, row in zip(counted.layers, counted.lifetimes, strict=True):
        axes.plot(edges, [100 * share for share in row], lw=1.2, marker="o", ms=2.5,
                  label=f"{layer}", color=_shade(layer, counted.layers))  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="dropped after this many tokens, up to twice as many", ylabel="% of all tokens")
    _layer_legend(axes, counted.layers)
    return figure


def nearest_keys(study: Study) -> Figure:
    """Fig. dropped_not_dropped: distance to the nearest other key, dropped against kept."""
    figure, both = panels([""] * len(study.nearest), 4.4, 3)
    for axes, (among, nearest) in zip(both, study.nearest.items(), strict=True):
        for values, means, name, colour in (
            (nearest.dropped, nearest.mean_dropped, "dropped", COLOURS[0]),
            (nearest.kept, nearest.mean_kept, "kept", ACCENT),
        ):
            label = f"{name}, mean {np.nanmean(means):.2f}" if np.isfinite(means).any() else name
            percent = [100 * v for v in values]
            axes.stairs(percent, nearest.edges, fill=True, alpha=0.4, color=colour)
            axes.stairs(percent, nearest.edges, color=colour, label=label)
        axes.set(xlabel=f"smallest cosine distance to {among}")
        axes.sharey(both[0])
        legend(axes)
    both[0].set_ylabel("% of tokens")
    return figure


def across_switch(study: Study) -> Figure:
    """How much of the text before a switch is still seen after it, by layer."""
    figure, axes = panel()
    switch = study.switch
    x = np.arange(len(switch.layers))
    axes.bar(x - 0.2, [100 * v for v in switch.within], 0.4, color=PALE, label="within a text",
             edgecolor=MUTED, linewidth=0.6)  # fmt: skip
    axes.bar(x + 0.2, [100 * v for v in switch.across], 0.4, color=ACCENT, label="across")
    if switch.expected is not None:
        axes.plot(x + 0.2, [100 * v for v in switch.expected], "_", color=INK, ms=12,
                  label="as far back without a switch")  # fmt: skip
    axes.set_xticks(x, [str(layer) for layer in switch.layers])
    axes.set(xlabel="layer", ylabel="pairs still seen, %", ylim=(0, 105))
    legend(axes, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def masks(trace: Trace, starts: list[int] | None = None) -> Figure:
    """Fig. attention_mask and context_switch: who can see whom, one square per layer."""
    from matplotlib.colors import ListedColormap

    titles = [
        f"{layer}: {trace.sparsity[number, -1]:.0%} gone"
        for number, layer in enumerate(trace.layers)
    ]
    figure, axes = panels(titles, 1.9, 2.1, columns=min(len(titles), 6))
    colours = ListedColormap(["#ffffff", PALE, ACCENT])
    for number, axis in enumerate(axes):
        axis.set_axis_off()
        axis.title.set_fontsize(8.5)
        mask = trace.visible(number)
        values = np.tril(np.ones_like(mask, dtype=int)) + mask
        axis.imshow(values, cmap=colours, vmin=0, vmax=2, interpolation="nearest")
        for start in (starts or [])[1:]:
            axis.plot([0, start], [start, start], color=COLOURS[5], lw=0.7)
            axis.plot([start, start], [start, len(mask)], color=COLOURS[5], lw=0.7)
    return figure


def _shade(layer: int, layers: list[int]) -> Any:
    return shade(layers.index(layer), len(layers))


def _layer_legend(axes: Any, layers: list[int]) -> None:
    if len(layers) <= 12:
        legend(axes, title="layer", ncols=2, fontsize=7.5, title_fontsize=8)
