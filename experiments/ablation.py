"""Variants of the recipe side by side: what an ablation of the paper asks, at our scale."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import PruningConfig

PALETTE = ("#2563eb", "#d97706", "#16a34a", "#9333ea", "#dc2626")


@dataclass(frozen=True)
class Variant:
    """One line of the figure: what differs from the recipe."""

    label: str
    method: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def run(
    name: str,
    description: str | None,
    variants: list[Variant],
    gammas: tuple[float, ...] = (0.1, 0.3),
) -> None:
    """Train each variant at each γ with each seed, publish the rows, draw them, print means."""
    args = small.arguments(description).parse_args()
    runs, rows, curves = small.Runs(args.runs), [], {}
    for seed in range(args.seeds):
        for gamma in gammas:
            for variant in variants:
                method = PruningConfig(**{"rank": small.RANK, **variant.method})
                record = runs.record(method, seed, gamma=gamma, **variant.settings)
                end = record["end"]
                for context, sparsity, perplexity in record["contexts"]:
                    row = {"variant": variant.label, "gamma": gamma, "seed": seed}
                    row |= {"context": context, "sparsity": sparsity, "perplexity": perplexity}
                    rows.append(row)
                # both gates on the whole book
                both = [f"{k}_{gate}" for gate in ("soft", "hard") for k in ("ppl", "sparsity")]
                rows[-1] |= {name: end[f"eval_{name}"] for name in both}
                curves[variant.label, gamma, seed] = record["curve"]
    publish(name, runs.about, rows)
    table(rows, gammas)
    draw(name, variants, gammas, rows, curves)


def table(rows: list[dict[str, Any]], gammas: tuple[float, ...]) -> None:
    """Means over seeds at full context, and half their range."""
    labels = list(dict.fromkeys(row["variant"] for row in rows))
    for label in labels:
        for gamma in gammas:
            found = [r for r in rows if (r["variant"], r["gamma"]) == (label, gamma)]
            at = [r for r in found if r["context"] == small.LENGTH]
            whole = [r for r in found if r["context"] == "all"]
            cells = [
                middle([100 * r["sparsity"] for r in at], "{:.1f} ± {:.1f} % at 512"),
                middle([100 * r["sparsity"] for r in whole], "{:.1f} ± {:.1f} % in all"),
                middle([r["perplexity"] for r in whole], "perplexity {:.2f} ± {:.2f}"),
            ]
            print(f"{label:24} γ = {gamma:<5}", "  ".join(cells))


def middle(values: list[float], form: str) -> str:
    return form.format(statistics.mean(values), (max(values) - min(values)) / 2)


def draw(
    name: str,
    variants: list[Variant],
    gammas: tuple[float, ...],
    rows: list[dict[str, Any]],
    curves: dict[tuple[str, float, int], dict[str, list[float]]],
) -> None:
    """Left: perplexity against sparsity. Right: language loss and sparsity over training."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for variant, colour in zip(variants, PALETTE, strict=False):
        whole = [r for r in rows if (r["variant"], r["context"]) == (variant.label, "all")]
        x, y = [100 * r["sparsity"] for r in whole], [r["perplexity"] for r in whole]
        # a hollow dot a run, a full one the mean over seeds
        axes[0].plot(x, y, "o", markersize=5, markerfacecolor="none", color=colour, alpha=0.6)
        at = [[r for r in whole if r["gamma"] == gamma] for gamma in gammas]
        means = [
            [statistics.mean(scale * r[name] for r in group) for group in at]
            for name, scale in (("sparsity", 100), ("perplexity", 1))
        ]
        axes[0].plot(*means, color=colour, marker="o", markersize=4, linewidth=1.4,
                     label=variant.label)  # fmt: skip
        curve = curves[variant.label, gammas[-1], 0]
        share = [step / max(curve["step"]) for step in curve["step"]]
        axes[1].plot(share, curve["loss_language"], color=colour, linewidth=1.2)
        percent = [100 * s for s in curve["sparsity_soft"]]
        axes[2].plot(share, percent, color=colour, linewidth=1.2)
    labels: list[tuple[str, str, Callable]] = [
        ("context pruned, %, all contexts", "perplexity, held-out book", axes[0].set),
        (f"share of the run, γ = {gammas[-1]}", "language loss in training", axes[1].set),
        (f"share of the run, γ = {gammas[-1]}", "soft sparsity in training, %", axes[2].set),
    ]
    for xlabel, ylabel, set_labels in labels:
        set_labels(xlabel=xlabel, ylabel=ylabel)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=9)
    save_figure(figure, name)
