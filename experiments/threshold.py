"""One model, a full curve: the score at which a vote drops a token, moved after training.

    python -m experiments.threshold           writes docs/results/threshold.json and a figure

Beyond the paper, whose only knob is γ before training. `protect_recent`, the tokens that no vote
can drop yet, is moved the same way. No new training: the models are those of tiny_curve.py.
"""

from __future__ import annotations

from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import PruningConfig
from kvprune.utils import plot

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
    knobs = ("threshold", "protect_recent")
    figure, axes = plot.panels([f"{knob} moved after training" for knob in knobs], 5.2)
    for axis, knob in zip(axes, knobs, strict=True):
        for number, gamma in enumerate(GAMMAS):
            own = [r for r in rows if (r["knob"], r["gamma"], r["context"], r["seed"])
                   == (knob, gamma, "all", 0)]  # fmt: skip
            x, y = [100 * r["sparsity"] for r in own], [r["perplexity"] for r in own]
            colour = plot.shade(number, len(GAMMAS))
            plot.line(axis, number, x, y, f"γ = {gamma}", color=colour)
            for row, a, b in zip(own, x, y, strict=True):
                axis.annotate(f"{row['value']:g}", (a, b), fontsize=7.5, color=plot.MUTED,
                              xytext=(3, 3), textcoords="offset points")  # fmt: skip
        axis.set(xlabel="context pruned, %, all contexts")
        axis.sharey(axes[0])
    axes[0].set_ylabel("perplexity, held-out book")
    plot.legend(axes[0])
    save_figure(figure, "threshold")


if __name__ == "__main__":
    main()
