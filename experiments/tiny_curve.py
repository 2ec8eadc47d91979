"""Perplexity against sparsity: pruning at several γ, and dense, local and strided attention.

    python -m experiments.tiny_curve        writes docs/results/tiny_curve.json and a figure

The paper's Fig. perplexity with the package's small model: each method is fine-tuned for the same
steps on the same text, then measured on a held-out book. It resumes where it stopped.
At the paper's scale, on GPUs, for each γ and the baselines:

    R="accelerate launch -m kvprune train --recipe recipes/gpt2-small.yaml"
    $R --gamma 0.3 --out runs/0.3;  $R --method local --window 256 --out runs/local-256
    kvprune eval perplexity runs/0.3 --held-out runs/0.3 --out results/0.3
"""

from __future__ import annotations

import statistics
from typing import Any

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import DenseConfig, LocalConfig, PruningConfig, StridedConfig, attach, tiny
from kvprune.config import Config
from kvprune.utils import plot

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
    # before fine-tuning
    for context, _, perplexity in small.by_context(attach(tiny.load_model(), DenseConfig())):
        row = {"method": "before", "setting": None, "seed": None, "context": context}
        rows.append({**row, "sparsity": 0.0, "perplexity": perplexity})
    # every setting with one seed before the next seed
    for seed in range(args.seeds):
        for method, setting in SETTINGS:
            more = {"gamma": setting} if method == "pruning" else {}
            record = runs.record(config_of(method, setting), seed, **more)
            for context, sparsity, perplexity in record["contexts"]:
                row = {"method": method, "setting": setting, "seed": seed, "context": context}
                rows.append({**row, "sparsity": sparsity, "perplexity": perplexity})
            if method == "pruning":
                # how far the trained gate is from the hard one that is used
                rows[-1] |= {k.removeprefix("eval_"): v for k, v in record["end"].items()
                             if k.endswith(("soft", "hard"))}  # fmt: skip
    publish("tiny_curve", runs.about, rows)
    draw(rows)


def config_of(method: str, setting: Any) -> Config:
    config: Config = {
        "dense": lambda: DenseConfig(),
        "pruning": lambda: PruningConfig(rank=small.RANK),
        "local": lambda: LocalConfig(setting),
        "strided": lambda: StridedConfig(setting),
    }[method]()
    return config


def draw(rows: list[dict[str, Any]]) -> None:
    """One panel per context size, one line per method: means over seeds, bars from min to max."""
    contexts = [*small.CONTEXTS[1:], "all"]
    titles = ["All contexts, 1 to 512" if n == "all" else f"Context {n}" for n in contexts]
    figure, axes = plot.panels(titles, 3.6, columns=len(contexts))
    for axis, context in zip(axes, contexts, strict=True):
        for number, method in enumerate(("dense", "pruning", "local", "strided")):
            points = means(rows, method, context)
            colour = plot.COLOURS[number]
            if method == "dense":
                before = means(rows, "before", context)[0][1]
                for y, style, label in ((points[0][1], "--", method), (before, ":", "not tuned")):
                    axis.axhline(y, color=colour, linestyle=style, linewidth=1.1, label=label)
                continue
            x = [100 * sparsity for sparsity, *_ in points]
            plot.line(axis, number, x, [mean for _, mean, *_ in points], method)
            for at, (_, _, low, high) in zip(x, points, strict=True):
                axis.plot([at, at], [low, high], color=colour, linewidth=1)
        axis.set_xlabel("context pruned, %")
    axes[0].set_ylabel("perplexity, held-out book")
    plot.legend(axes[0])
    save_figure(figure, "tiny_curve")


def means(rows: list[dict[str, Any]], method: str, context: Any) -> list[tuple[float, ...]]:
    """Sparsity, mean perplexity, and its minimum and maximum over seeds; sorted by sparsity."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if (row["method"], row["context"]) == (method, context):
            groups.setdefault(row["setting"], []).append(row)
    points = []
    for group in groups.values():
        values = [row["perplexity"] for row in group]
        sparsity = statistics.mean(row["sparsity"] for row in group)
        points.append((sparsity, statistics.mean(values), min(values), max(values)))
    return sorted(points)


if __name__ == "__main__":
    main()
