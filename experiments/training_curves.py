"""The course of training: language loss, sparsity and α over its steps, for several γ.

    python -m experiments.training_curves     writes docs/results/training_curves.json and a figure

The paper's Fig. training_0.3; the runs are those of tiny_curve.py.
# full scale: kvprune train --recipe recipes/gpt2-small.yaml --out runs/gpt2-small; each run writes
# curves.svg, and TensorBoard reads its logs
"""

from __future__ import annotations

from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import DenseConfig, PruningConfig
from kvprune.utils.plot import COLOURS, legend, panels

GAMMAS = (0.03, 0.1, 0.3, 1.0)


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    runs, rows = small.Runs(args.runs), []
    for seed in range(args.seeds):
        rows.append({"gamma": None, "seed": seed, **runs.record(DenseConfig(), seed)["curve"]})
        for gamma in GAMMAS:
            record = runs.record(PruningConfig(rank=small.RANK), seed, gamma=gamma)
            rows.append({"gamma": gamma, "seed": seed, **record["curve"]})
    publish("training_curves", runs.about, rows)
    draw(rows)


def draw(rows: list[dict[str, Any]]) -> None:
    """One line per run; two seeds of a γ share a colour."""
    figure, axes = panels(["Language loss of a step", "Soft sparsity, %", "α"])
    for row in rows:
        number = 0 if row["gamma"] is None else 1 + GAMMAS.index(row["gamma"])
        name = "dense" if row["gamma"] is None else f"γ = {row['gamma']}"
        style: dict[str, Any] = {"color": COLOURS[number], "linewidth": 1.2}
        style |= {"label": name} if row["seed"] == 0 else {"linestyle": (0, (3, 2))}
        axes[0].plot(row["step"], row["loss_language"], **style)
        if row["gamma"] is not None:
            axes[1].plot(row["step"], [100 * share for share in row["sparsity_soft"]], **style)
            if row is rows[1]:
                axes[2].plot(row["step"], row["alpha"], color=COLOURS[0])
    for axis in axes:
        axis.set_xlabel("step")
    legend(axes[0])
    save_figure(figure, "training_curves")


if __name__ == "__main__":
    main()
