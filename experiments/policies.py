"""Learned forgetting against policies without training, all with the same number of slots.

    python -m experiments.policies            writes docs/results/policies.json and a figure

Beyond the paper: StreamingLLM (first tokens and a window), TOVA and H2O (least attention leaves) on
the dense fine-tuned model, each with as many tokens a layer as a pruned model of tiny_curve.py has
at the end of a window, mean over layers.
"""

from __future__ import annotations

from typing import Any

import kvprune
from experiments import small
from experiments.publish import publish, save_figure
from kvprune import DenseConfig, H2OConfig, PruningConfig, StreamingConfig, TovaConfig
from kvprune.evaluate.perplexity.measure import perplexity

GAMMAS = (0.1, 0.3, 1.0)
POLICIES = {"streaming": StreamingConfig, "tova": TovaConfig, "h2o": H2OConfig}
WINDOWS = 24
COLOURS = {
    "pruning": "#2563eb", "streaming": "#d97706", "tova": "#16a34a", "h2o": "#9333ea",
}  # fmt: skip


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    runs, rows = small.Runs(args.runs), []
    for gamma in GAMMAS:
        for seed in range(args.seeds):
            pruned = runs.model(PruningConfig(rank=small.RANK), seed, gamma=gamma)
            found = measure(pruned)
            rows.append({"method": "pruning", "gamma": gamma, "seed": seed, **found})
            budget = max(8, round((1 - found["sparsity_at_end"]) * small.LENGTH))
            for name, config in POLICIES.items():
                dense = runs.model(DenseConfig(), seed)
                dense.detach()
                found = measure(kvprune.attach(dense.model, config(budget=budget)))
                row = {"method": name, "gamma": gamma, "seed": seed, "budget": budget}
                rows.append({**row, **found})
                print(rows[-1], flush=True)
    publish("policies", {**runs.about, "windows": WINDOWS}, rows)
    draw(rows)


def measure(pruned: kvprune.Pruned) -> dict[str, float]:
    """Perplexity over all contexts, and at the end of a window, with the sparsity there."""
    end, whole = perplexity(
        pruned, small.held_out(), [small.LENGTH], length=small.LENGTH, max_windows=WINDOWS,
        progress=False, path="cached", batch=8,
    )  # fmt: skip
    return {
        "sparsity_at_end": end.sparsity,
        "sparsity": whole.sparsity,
        "perplexity": whole.perplexity,
    }


def draw(rows: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(5.8, 3.9), layout="constrained")
    for method, colour in COLOURS.items():
        points = []
        for gamma in GAMMAS:
            found = [r for r in rows if (r["method"], r["gamma"]) == (method, gamma)]
            x = sum(100 * r["sparsity_at_end"] for r in found) / len(found)
            points.append((x, sum(r["perplexity"] for r in found) / len(found)))
        axis.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, color=colour,
                  label=method)  # fmt: skip
    axis.set(xlabel="context gone at 512 tokens, %", ylabel="perplexity, all contexts")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    save_figure(figure, "policies")


if __name__ == "__main__":
    main()
