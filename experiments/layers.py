"""Which layers forget? Sparsity by layer for several γ, and tokens held by context size.

    python -m experiments.layers              writes docs/results/layers.json and a figure

The paper's Fig. sparsity_per_layer and number_of_tokens_not_dropped; the models of tiny_curve.py.
At the paper's scale: kvprune eval perplexity and kvprune explain --corpus on each trained model.
"""

from __future__ import annotations

from typing import Any

import torch

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import PruningConfig
from kvprune.utils import plot

GAMMAS = (0.03, 0.1, 0.3, 1.0)
WINDOWS = 24


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    runs, rows = small.Runs(args.runs), []
    text = small.held_out()[: WINDOWS * small.LENGTH].view(WINDOWS, small.LENGTH)
    for gamma in GAMMAS:
        for seed in range(args.seeds):
            pruned = runs.model(PruningConfig(rank=small.RANK), seed, gamma=gamma)
            steps = torch.cat([pruned.trace(part) for part in text.split(8)], dim=1)  # (L, W, T)
            for layer, step in enumerate(steps):
                for context in small.CONTEXTS:
                    # what the token after the context still sees of it
                    kept = float((step[:, :context] > context - 1).float().sum(-1).mean())
                    row = {"gamma": gamma, "seed": seed, "layer": layer, "context": context}
                    rows.append({**row, "kept": kept, "sparsity": 1 - kept / context})
    publish("layers", runs.about, rows)
    draw(rows)


def draw(rows: list[dict[str, Any]]) -> None:
    figure, axes = plot.panels(["Context pruned at 512 tokens, %", "Tokens held, γ = 0.3"], 5.4)
    layers = sorted({row["layer"] for row in rows})
    width = 0.8 / len(GAMMAS)
    for number, gamma in enumerate(GAMMAS):
        shares = [100 * mean(rows, "sparsity", gamma, layer, 512) for layer in layers]
        places = [layer + (number - 1.5) * width for layer in layers]
        colour = plot.shade(number, len(GAMMAS))
        axes[0].bar(places, shares, width, color=colour, label=f"γ = {gamma}")
    for number, context in enumerate(small.CONTEXTS):
        kept = [mean(rows, "kept", 0.3, layer, context) for layer in layers]
        colour = plot.shade(number, len(small.CONTEXTS))
        plot.line(axes[1], number, layers, kept, f"{context} read", color=colour)
    for axis in axes:
        axis.set(xlabel="layer", xticks=layers)
        axis.grid(visible=False, axis="x")
    plot.legend(axes[0], loc="center left", bbox_to_anchor=(1, 0.5))
    plot.legend(axes[1])
    save_figure(figure, "layers")


def mean(rows: list[dict[str, Any]], what: str, gamma: float, layer: int, context: int) -> float:
    key = (gamma, layer, context)
    values = [r[what] for r in rows if (r["gamma"], r["layer"], r["context"]) == key]
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
