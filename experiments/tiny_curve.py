"""Perplexity against sparsity: pruning at several γ, and dense, local and strided attention.

    python experiments/tiny_curve.py        writes docs/results/tiny_curve.json and a figure

The paper's Fig. perplexity with the package's small model: each method is fine-tuned for the same
steps on the same text, then measured on a book that no run has seen. It goes on where it stopped.
At the paper's scale, on GPUs, for each γ in 0.03 … 3 and the baselines:

    R="accelerate launch -m kvprune train --recipe recipes/gpt2-small.yaml"
    $R --gamma 0.3 --out runs/0.3;  $R --method local --window 256 --out runs/local-256
    kvprune eval perplexity runs/0.3 --data wikipedia --out results/0.3
"""

from __future__ import annotations

import statistics
from typing import Any

import small

from kvprune import DenseConfig, LocalConfig, PruningConfig, StridedConfig
from kvprune.evaluate.points import Points

GAMMAS = (0.03, 0.1, 0.3, 1.0)
# method and its setting: γ, window, stride
SETTINGS: list[tuple[str, float | None]] = [
    ("dense", None),
    *(("pruning", gamma) for gamma in GAMMAS),
    *(("local", window) for window in (256, 128, 64)),
    *(("strided", stride) for stride in (256, 128, 64)),
]
COLOURS = {"pruning": "#2563eb", "local": "#d97706", "strided": "#16a34a", "dense": "#64748b"}


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    points = Points(args.out / "tiny_curve.json", small.about(steps=args.steps))
    # all settings once before any of them twice
    for seed in range(args.seeds):
        for method, setting in SETTINGS:
            key = {"method": method, "setting": setting, "seed": seed}
            rows = points.measure(key, lambda key=key: run(**key, steps=args.steps))
            found = {row["context"]: (row["sparsity"], row["perplexity"]) for row in rows}
            print(method, setting, seed, found, flush=True)
    small.publish("tiny_curve", points.about, points.rows)
    draw(points.rows)


def run(method: str, setting: Any, seed: int, steps: int) -> list[dict[str, Any]]:
    gamma = {"gamma": setting} if method == "pruning" else {}
    config = {
        "dense": lambda: DenseConfig(),
        "pruning": lambda: PruningConfig(rank=small.RANK),
        "local": lambda: LocalConfig(setting),
        "strided": lambda: StridedConfig(setting),
    }[method]()
    trainer = small.fine_tuned(config, seed, steps=steps, **gamma)
    soft = {}
    if method == "pruning":
        # how far the soft gate that was trained is from the hard one that is used
        found = trainer.evaluate()
        soft = {f"{k}_{gate}_at_end": found[f"eval_{k}_{gate}"]
                for k in ("ppl", "sparsity") for gate in ("soft", "hard")}  # fmt: skip
    rows = small.measured(trainer.pruned)
    rows[-1] |= soft
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """A panel a context size, a line a method: means over seeds, bars from least to most."""
    import matplotlib.pyplot as plt

    contexts = [*small.CONTEXTS[1:], "all"]
    figure, axes = plt.subplots(1, len(contexts), figsize=(13, 3.6), layout="constrained")
    for axis, context in zip(axes, contexts, strict=True):
        for method, colour in COLOURS.items():
            found = mean_points(rows, method, context)
            if method == "dense":
                axis.axhline(found[0][1], color=colour, linestyle="--", linewidth=1, label=method)
                continue
            x, y, low, high = zip(*found, strict=True)
            spread = [[a - b for a, b in zip(y, low, strict=True)],
                      [b - a for a, b in zip(y, high, strict=True)]]  # fmt: skip
            axis.errorbar([100 * s for s in x], y, spread, color=colour, marker="o", markersize=4,
                          linewidth=1.4, capsize=2, label=method)  # fmt: skip
        title = "all contexts, 1 to 512" if context == "all" else f"context {context}"
        axis.set(title=title, xlabel="context pruned, %")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("perplexity, held-out book")
    axes[0].legend(frameon=False)
    for ending in ("svg", "png"):
        file = small.DOCS / "figures" / f"tiny_curve.{ending}"
        figure.savefig(file, dpi=130)
        print(f"wrote {file}")


def mean_points(rows: list[dict[str, Any]], method: str, context: Any) -> list[tuple[float, ...]]:
    """Sparsity, perplexity, and its least and most over seeds, by sparsity."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if (row["method"], row["context"]) == (method, context):
            groups.setdefault(row["setting"], []).append(row)
    made = []
    for group in groups.values():
        values = [row["perplexity"] for row in group]
        sparsity = statistics.mean(row["sparsity"] for row in group)
        made.append((sparsity, statistics.mean(values), min(values), max(values)))
    return sorted(made)


if __name__ == "__main__":
    main()
