"""Variants of the recipe compared: an ablation of the paper at our scale."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import PruningConfig
from kvprune.utils import plot


@dataclass(frozen=True)
class Variant:
    """One line of the figure: its differences from the recipe."""

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
                # both gates on the complete book
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
            own = [r for r in rows if (r["variant"], r["gamma"]) == (label, gamma)]
            at = [r for r in own if r["context"] == small.LENGTH]
            overall = [r for r in own if r["context"] == "all"]
            cells = [
                middle([100 * r["sparsity"] for r in at], "{:.1f} ± {:.1f} % at 512"),
                middle([100 * r["sparsity"] for r in overall], "{:.1f} ± {:.1f} % in all"),
                middle([r["perplexity"] for r in overall], "perplexity {:.2f} ± {:.2f}"),
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
    figure, axes = plot.panels(["Perplexity", "Language loss in training", "Soft sparsity, %"])
    for number, variant in enumerate(variants, 1):
        colour = plot.COLOURS[number]
        overall = [r for r in rows if (r["variant"], r["context"]) == (variant.label, "all")]
        x, y = [100 * r["sparsity"] for r in overall], [r["perplexity"] for r in overall]
        # one hollow dot per run; the line goes through the means over seeds
        axes[0].plot(x, y, "o", markerfacecolor="none", color=colour, alpha=0.6)
        by_gamma = [[r for r in overall if r["gamma"] == gamma] for gamma in gammas]
        means = [
            [statistics.mean(scale * r[key] for r in group) for group in by_gamma]
            for key, scale in (("sparsity", 100), ("perplexity", 1))
        ]
        plot.line(axes[0], number, means[0], means[1], variant.label)
        curve = curves[variant.label, gammas[-1], 0]
        share = [step / max(curve["step"]) for step in curve["step"]]
        axes[1].plot(share, curve["loss_language"], color=colour, linewidth=1.2)
        percent = [100 * s for s in curve["sparsity_soft"]]
        axes[2].plot(share, percent, color=colour, linewidth=1.2)
    axes[0].set(xlabel="context pruned, %, all contexts", ylabel="perplexity, held-out book")
    for axis in axes[1:]:
        axis.set_xlabel(f"share of the run, γ = {gammas[-1]}")
    plot.legend(axes[0])
    save_figure(figure, name)
