"""Perplexity against sparsity: pruning at several γ, and dense, local and strided attention.

    python -m experiments.tiny_curve        writes docs/results/tiny_curve.json and a figure

The paper's Fig. perplexity with the package's small model: each method is fine-tuned for the same
steps on the same text, then measured on a book that no run has seen. It goes on where it stopped.
At the paper's scale, on GPUs, for each γ and the baselines:

    R="accelerate launch -m kvprune train --recipe recipes/gpt2-small.yaml"
    $R --gamma 0.3 --out runs/0.3;  $R --method local --window 256 --out runs/local-256
    kvprune eval perplexity runs/0.3 --data wikipedia --out results/0.3
"""

from __future__ import annotations

import statistics
from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import DenseConfig, LocalConfig, PruningConfig, StridedConfig, attach, tiny
from kvprune.config import Config

# method and its setting: γ, window, stride
SETTINGS: list[tuple[str, Any]] = [
    ("dense", None),
    *(("pruning", gamma) for gamma in (0.03, 0.1, 0.3, 1.0)),
    *(("local", window) for window in (256, 128, 64)),
    *(("strided", stride) for stride in (256, 128, 64)),
]


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    runs, rows = small.Runs(args.runs), []
    # what it was before any fine-tuning, on books that are not this one
    for context, _, perplexity in small.by_context(attach(tiny.load_model(), DenseConfig())):
        row = {"method": "before", "setting": None, "seed": None, "context": context}
        rows.append({**row, "sparsity": 0.0, "perplexity": perplexity})
    # all settings once before any of them twice
    for seed in range(args.seeds):
        for method, setting in SETTINGS:
            more = {"gamma": setting} if method == "pruning" else {}
            record = runs.record(config_of(method, setting), seed, **more)
            for context, sparsity, perplexity in record["contexts"]:
                row = {"method": method, "setting": setting, "seed": seed, "context": context}
                rows.append({**row, "sparsity": sparsity, "perplexity": perplexity})
            if method == "pruning":
                # how far the gate that was trained is from the hard one that is used
                rows[-1] |= {k.removeprefix("eval_"): v for k, v in record["end"].items()
                             if k.endswith(("soft", "hard"))}  # fmt: skip
    publish("tiny_curve", runs.about, rows)
    draw(rows)


def config_of(method: str, setting: Any) -> Config:
    made: Config = {
        "dense": lambda: DenseConfig(),
        "pruning": lambda: PruningConfig(rank=small.RANK),
        "local": lambda: LocalConfig(setting),
        "strided": lambda: StridedConfig(setting),
    }[method]()
    return made


def draw(rows: list[dict[str, Any]]) -> None:
    """A panel a context size, a line a method: means over seeds, bars from least to most."""
    import matplotlib.pyplot as plt

    contexts = [*small.CONTEXTS[1:], "all"]
    figure, axes = plt.subplots(1, len(contexts), figsize=(13, 3.6), layout="constrained")
    for axis, context in zip(axes, contexts, strict=True):
        for method, colour in small.COLOURS.items():
            found = means(rows, method, context)
            if method == "dense":
                axis.axhline(found[0][1], color=colour, linestyle="--", linewidth=1, label=method)
                before = means(rows, "before", context)[0][1]
                axis.axhline(before, color=colour, linestyle=":", linewidth=1, label="not tuned")
                continue
            x, y, least, most = zip(*found, strict=True)
            spread = [[b - a for a, b in zip(least, y, strict=True)],
                      [b - a for a, b in zip(y, most, strict=True)]]  # fmt: skip
            axis.errorbar([100 * s for s in x], y, spread, color=colour, marker="o", markersize=4,
                          linewidth=1.4, capsize=2, label=method)  # fmt: skip
        title = "all contexts, 1 to 512" if context == "all" else f"context {context}"
        axis.set(title=title, xlabel="context pruned, %")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("perplexity, held-out book")
    axes[0].legend(frameon=False)
    save_figure(figure, "tiny_curve")


def means(rows: list[dict[str, Any]], method: str, context: Any) -> list[tuple[float, ...]]:
    """Sparsity, perplexity, and its least and most over seeds, by sparsity."""
    groups: dict[Any, list[dict[str, Any]]] = {}
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
