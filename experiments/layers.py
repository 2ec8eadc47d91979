"""Where is the forgetting? Sparsity by layer for several γ, and tokens held by context size.

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
                    # what the token after so many still sees of them
                    kept = float((step[:, :context] > context - 1).float().sum(-1).mean())
                    row = {"gamma": gamma, "seed": seed, "layer": layer, "context": context}
                    rows.append({**row, "kept": kept, "sparsity": 1 - kept / context})
    publish("layers", runs.about, rows)
    draw(rows)


def draw(rows: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    layers = sorted({row["layer"] for row in rows})
    width = 0.8 / len(GAMMAS)
    for i, gamma in enumerate(GAMMAS):
        colour = plt.get_cmap("viridis")(i / len(GAMMAS))
        shares = [100 * mean(rows, "sparsity", gamma, layer, 512) for layer in layers]
        places = [layer + (i - 1.5) * width for layer in layers]
        axes[0].bar(places, shares, width, color=colour, label=f"γ = {gamma}")
    for i, context in enumerate(small.CONTEXTS):
        colour = plt.get_cmap("plasma")(i / len(small.CONTEXTS))
        kept = [mean(rows, "kept", 0.3, layer, context) for layer in layers]
        axes[1].plot(layers, kept, marker="o", markersize=4, color=colour, label=f"{context} read")
    axes[0].set(xlabel="layer", ylabel="context pruned at 512 tokens, %")
    axes[1].set(xlabel="layer", ylabel="tokens held, γ = 0.3")
    for axis in axes:
        axis.set_xticks(layers)
        axis.legend(frameon=False, fontsize=9, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, axis="y")
    save_figure(figure, "layers")


def mean(rows: list[dict[str, Any]], what: str, gamma: float, layer: int, context: int) -> float:
    asked = (gamma, layer, context)
    found = [r[what] for r in rows if (r["gamma"], r["layer"], r["context"]) == asked]
    return sum(found) / len(found)


if __name__ == "__main__":
    main()
