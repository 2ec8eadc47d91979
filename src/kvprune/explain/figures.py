"""The paper's figures on interpretability, drawn from a study. Each can be drawn alone."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.errors import PruneError
from kvprune.explain.corpus_study import Study
from kvprune.explain.statistics import Statistics
from kvprune.explain.trace import Trace
from kvprune.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, QUIET, ACCENT, EMPTY = "#334155", "#94a3b8", "#2f6f6a", "#ece9e3"
STYLE = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": QUIET,
    "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "text.color": INK,
    "svg.hashsalt": "kvprune", "legend.frameon": False,
}  # fmt: skip


def save(study: Study, folder: str | Path, prefix: str = "forgetting") -> list[Path]:
    """Write every figure as SVG; the same numbers give the same bytes."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for name, figure in draw(study).items():
        held = io.BytesIO()
        with _matplotlib().rc_context(STYLE):
            figure.savefig(held, format="svg", metadata={"Date": None}, bbox_inches="tight")
        files.append(Path(folder) / f"{prefix}_{name}.svg")
        write_atomically(files[-1], held.getvalue())
    return files


def draw(study: Study) -> dict[str, Figure]:
    """All figures by name."""
    with _matplotlib().rc_context(STYLE):
        made = {
            "speech": kept_by_speech(study.statistics),
            "droppers": droppers(study.statistics),
            "positions": by_position(study.statistics),
            "lifetimes": lifetimes(study.statistics),
            "keys": nearest_keys(study),
            "switch": across_switch(study),
            "masks": masks(study.switch_trace, study.switch.starts),
        }
    return made


def kept_by_speech(counted: Statistics) -> Figure:
    """Fig. interpretability, bottom left: how likely a token stays, by part of speech."""
    kept = counted.kept_by_speech or counted.kept_by_kind
    figure, axes = _axes(5, 0.24 * len(kept) + 0.8)
    names = list(kept)[::-1]
    axes.barh(
        names, [100 * kept[name].share for name in names], color=ACCENT, alpha=0.55, height=0.65
    )
    for y, name in enumerate(names):
        axes.plot([100 * s for s in kept[name].by_layer], [y] * len(kept[name].by_layer), "|",
                  color=INK, markersize=5, alpha=0.6)  # fmt: skip
    axes.set_xlabel("later tokens that still see it, % (ticks: single layers)")
    return figure


def droppers(counted: Statistics) -> Figure:
    """Fig. interpretability, bottom middle: which tokens cause drops, by layer."""
    rows = counted.droppers_by_kind
    busy = [i for i, drops in enumerate(counted.drops_by_layer) if drops]
    names = [f"layer {counted.layers[i]}" for i in busy] + ["all drops", "all tokens"]
    figure, axes = _axes(6, max(2.8, 0.19 * len(names)))
    left = np.zeros(len(names))
    for number, (name, row) in enumerate(rows.items()):
        shares = [row.by_layer[i] for i in busy] + [row.share, row.of_tokens]
        widths = 100 * np.array(shares)
        axes.barh(names[::-1], widths[::-1], left=left[::-1], label=name, height=0.7,
                  color=_shades(number / max(len(rows) - 1, 1)))  # fmt: skip
        left += widths
    axes.set_xlabel("% of drops, by the kind of token that caused them")
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1.0), fontsize=8)
    return figure


def by_position(counted: Statistics) -> Figure:
    """Fig. interpretability, bottom right: tokens dropped by their position, each layer a line."""
    figure, axes = _axes(5, 2.6)
    for layer, row in zip(counted.layers, counted.dropped_by_position, strict=True):
        axes.plot(counted.positions, [100 * share for share in row], lw=1.2, label=f"{layer}",
                  color=_shade(layer, counted.layers))  # fmt: skip
    axes.set(xlabel="position of the token", ylabel="dropped by the end, %", ylim=(0, 101))
    _layer_legend(axes, counted.layers)
    return figure


def lifetimes(counted: Statistics) -> Figure:
    """How many tokens later a token is dropped, each layer a line."""
    figure, axes = _axes(5, 2.6)
    edges = [2**b for b in range(len(counted.lifetimes[0]))]
    for layer, row in zip(counted.layers, counted.lifetimes, strict=True):
        axes.plot(edges, [100 * share for share in row], lw=1.2, marker="o", ms=2.5,
                  label=f"{layer}", color=_shade(layer, counted.layers))  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set(xlabel="dropped so many tokens later, up to twice as many", ylabel="% of all tokens")
    _layer_legend(axes, counted.layers)
    return figure


def nearest_keys(study: Study) -> Figure:
    """Fig. dropped_not_dropped: distance to the nearest other key, dropped against kept."""
    figure = _figure(8, 2.6)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (among, found) in zip(panels, study.nearest.items(), strict=True):
        for values, means, name, colour in (
            (found.dropped, found.mean_dropped, "dropped", QUIET),
            (found.kept, found.mean_kept, "kept", ACCENT),
        ):
            label = f"{name}, mean {np.nanmean(means):.2f}" if np.isfinite(means).any() else name
            axes.stairs([100 * v for v in values], found.edges, fill=True, alpha=0.4, color=colour)
            axes.stairs([100 * v for v in values], found.edges, color=colour, label=label)
        axes.set(xlabel=f"smallest cosine distance to {among}")
        axes.legend()
    panels[0].set_ylabel("% of tokens")
    return figure


def across_switch(study: Study) -> Figure:
    """How much of the text before a switch is still seen after it, by layer."""
    figure, axes = _axes(5, 2.6)
    found = study.switch
    places = np.arange(len(found.layers))
    axes.bar(places - 0.2, [100 * v for v in found.within], 0.4, color=EMPTY, label="within a text",
             edgecolor=QUIET, linewidth=0.6)  # fmt: skip
    axes.bar(places + 0.2, [100 * v for v in found.across], 0.4, color=ACCENT, label="across")
    if found.expected is not None:
        axes.plot(places + 0.2, [100 * v for v in found.expected], "_", color=INK, ms=12,
                  label="as far back without a switch")  # fmt: skip
    axes.set_xticks(places, [str(layer) for layer in found.layers])
    axes.set(xlabel="layer", ylabel="pairs still seen, %", ylim=(0, 105))
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    return figure


def masks(trace: Trace, starts: list[int] | None = None) -> Figure:
    """Fig. attention_mask and context_switch: who can see whom, every layer a square."""
    from matplotlib.colors import ListedColormap

    L = len(trace.layers)
    columns = min(L, 6)
    rows = -(-L // columns)
    figure = _figure(1.7 * columns, 1.9 * rows)
    axes = figure.subplots(rows, columns, squeeze=False)
    colours = ListedColormap(["#ffffff", EMPTY, ACCENT])
    for place, axis in enumerate(axes.flat):
        axis.axis("off")
        if place >= L:
            continue
        mask = trace.visible(place)
        values = np.tril(np.ones_like(mask, dtype=int)) + mask
        axis.imshow(values, cmap=colours, vmin=0, vmax=2, interpolation="nearest")
        axis.set_title(
            f"{trace.layers[place]}: {trace.sparsity[place, -1]:.0%} gone", fontsize=8, color=INK
        )
        for start in (starts or [])[1:]:
            axis.plot([0, start], [start, start], color="#b4552d", lw=0.7)
            axis.plot([start, start], [start, len(mask)], color="#b4552d", lw=0.7)
    return figure


def _axes(width: float, height: float) -> tuple[Figure, Any]:
    figure = _figure(width, height)
    return figure, figure.subplots()


def _figure(width: float, height: float) -> Figure:
    # not through pyplot, which keeps every figure until it is closed
    figure: Figure = _matplotlib().figure.Figure(figsize=(width, height))
    return figure


def _shades(share: float) -> Any:
    return _matplotlib().colormaps["viridis"](share)


def _shade(layer: int, layers: list[int]) -> Any:
    return _shades(0.9 * layers.index(layer) / max(len(layers) - 1, 1))


def _layer_legend(axes: Any, layers: list[int]) -> None:
    if len(layers) <= 12:
        axes.legend(title="layer", ncols=2, fontsize=7, title_fontsize=8)


def _matplotlib() -> Any:
    try:
        import matplotlib.figure
    except ImportError as error:
        raise PruneError("figures need matplotlib: pip install 'kvprune[explain]'") from error
    return matplotlib
