"""One model, a whole curve: the score at which a vote drops a token, moved after training.

    python -m experiments.threshold           writes docs/results/threshold.json and a figure

Beyond the paper, whose only knob is γ before training. `protect_recent`, the tokens that no vote
can drop yet, is moved the same way. No new training: the models are those of tiny_curve.py.
"""

from __future__ import annotations

from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import PruningConfig

GAMMAS = (0.1, 0.3, 1.0)
THRESHOLDS = (-0.4, -0.2, -0.1, 0.0, 0.1, 0.2, 0.4)
RECENT = (0, 4, 16, 64)


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    runs, rows = small.Runs(args.runs), []
    for gamma in GAMMAS:
        for seed in range(args.seeds):
            pruned = runs.model(PruningConfig(rank=small.RANK), seed, gamma=gamma)
            for knob, values in (("threshold", THRESHOLDS), ("protect_recent", RECENT)):
                for value in values:
                    pruned.adjust(**{"threshold": 0.0, "protect_recent": 0, knob: value})
                    for context, sparsity, perplexity in small.by_context(pruned, windows=24):
                        row = {"gamma": gamma, "seed": seed, "knob": knob, "value": value}
                        row |= {"context": context, "sparsity": sparsity, "perplexity": perplexity}
                        rows.append(row)
                    print(rows[-1], flush=True)
    publish("threshold", runs.about, rows)
    draw(rows)


def draw(rows: list[dict[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained", sharey=True)
    for axis, knob in zip(axes, ("threshold", "protect_recent"), strict=True):
        for i, gamma in enumerate(GAMMAS):
            found = [r for r in rows if (r["knob"], r["gamma"], r["context"], r["seed"])
                     == (knob, gamma, "all", 0)]  # fmt: skip
            x, y = [100 * r["sparsity"] for r in found], [r["perplexity"] for r in found]
            axis.plot(x, y, marker="o", markersize=4, linewidth=1.3, label=f"γ = {gamma}",
                      color=plt.get_cmap("viridis")(i / len(GAMMAS)))  # fmt: skip
            for r, a, b in zip(found, x, y, strict=True):
                axis.annotate(f"{r['value']:g}", (a, b), fontsize=7, xytext=(3, 3),
                              textcoords="offset points")  # fmt: skip
        axis.set(xlabel="context pruned, %, all contexts", title=f"{knob} moved after training")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("perplexity, held-out book")
    axes[0].legend(frameon=False)
    save_figure(figure, "threshold")


if __name__ == "__main__":
    main()
