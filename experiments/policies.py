"""Learned forgetting against policies without training, all with the same number of slots.

    python -m experiments.policies            writes docs/results/policies.json and a figure

Beyond the paper: StreamingLLM (first tokens and a window), TOVA and H2O (drop the least attention)
on the dense fine-tuned model, each with as many tokens per layer as a pruned model of tiny_curve.py
has at the end of a window, mean over layers.
"""

from __future__ import annotations

from typing import Any

import kvprune
from experiments import small
from experiments.publish import publish, save_figure
from kvprune import DenseConfig, H2OConfig, PruningConfig, StreamingConfig, TovaConfig
from kvprune.evaluate.perplexity.measure import perplexity
from kvprune.utils import plot

GAMMAS = (0.1, 0.3, 1.0)
POLICIES = {"streaming": StreamingConfig, "tova": TovaConfig, "h2o": H2OConfig}
WINDOWS = 24


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    runs, rows = small.Runs(args.runs), []
    for gamma in GAMMAS:
        for seed in range(args.seeds):
            pruned = runs.model(PruningConfig(rank=small.RANK), seed, gamma=gamma)
            measured = measure(pruned)
            rows.append({"method": "pruning", "gamma": gamma, "seed": seed, **measured})
            budget = max(8, round((1 - measured["sparsity_at_end"]) * small.LENGTH))
            for name, config in POLICIES.items():
                dense = runs.model(DenseConfig(), seed)
                dense.detach()
                measured = measure(kvprune.attach(dense.model, config(budget=budget)))
                row = {"method": name, "gamma": gamma, "seed": seed, "budget": budget}
                rows.append({**row, **measured})
                print(rows[-1], flush=True)
    publish("policies", {**runs.about, "windows": WINDOWS}, rows)
    draw(rows)


def measure(pruned: kvprune.Pruned) -> dict[str, float]:
    """Perplexity over all contexts, and at the end of a window, with its sparsity."""
    end, overall = perplexity(
        pruned, small.held_out(), [small.LENGTH], length=small.LENGTH, max_windows=WINDOWS,
        progress=False, path="cached", batch=8,
    )  # fmt: skip
    return {
        "sparsity_at_end": end.sparsity,
        "sparsity": overall.sparsity,
        "perplexity": overall.perplexity,
    }


def draw(rows: list[dict[str, Any]]) -> None:
    figure, axis = plot.panel()
    for number, method in enumerate(("pruning", *POLICIES), 1):
        points = []
        for gamma in GAMMAS:
            own = [r for r in rows if (r["method"], r["gamma"]) == (method, gamma)]
            sparsity = sum(100 * r["sparsity_at_end"] for r in own) / len(own)
            points.append((sparsity, sum(r["perplexity"] for r in own) / len(own)))
        points.sort()
        plot.line(axis, number, [x for x, _ in points], [y for _, y in points], method)
    axis.set(xlabel="context gone at 512 tokens, %", ylabel="perplexity, all contexts")
    plot.legend(axis)
    save_figure(figure, "policies")


if __name__ == "__main__":
    main()
