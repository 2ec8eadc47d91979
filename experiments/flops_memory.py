"""What a token costs and what a cache holds, for the four GPT-2 sizes: by formula.

    python -m experiments.flops_memory        writes docs/results/flops_memory.json and a figure

The paper's Fig. flops_memory at full scale: no weights are needed. `tests/evaluate/test_cost.py`
holds the formulas against counted operations and real storages.
"""

from __future__ import annotations

from typing import Any

from experiments.publish import publish, save_figure
from kvprune.evaluate.cost.formulas import PARTS, cost
from kvprune.evaluate.cost.shape import read_shape
from kvprune.utils.plot import COLOURS, legend, line, panels

MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
SPARSITIES = (0.0, 0.25, 0.5, 0.65, 0.8, 0.9, 0.95)
CONTEXT, RANK = 1024, 64


def main() -> None:
    shapes = [read_shape(model, "float16") for model in MODELS]
    rows = [
        {"model": name, **{k: v for k, v in row.items() if k != "model"}}
        for name, shape in zip(MODELS, shapes, strict=True)
        for row in cost(shape, SPARSITIES, (CONTEXT,), (1,), RANK)
    ]
    publish("flops_memory", {"context": CONTEXT, "rank": RANK, "dtype": "float16"}, rows)
    for row in rows:
        if row["sparsity"] in (0.0, 0.8):
            flops = row["flops_token"] / rows_of(rows, row["model"], "dense")[0]["flops_token"]
            print(f"{row['model']:12} {row['method']:7} {row['sparsity']:4.0%}  FLOPs {flops:.3f} ×"
                  f"  cache {row['cache_ratio']:.3f} ×")  # fmt: skip
    draw(rows)


def rows_of(rows: list[dict[str, Any]], model: str, method: str) -> list[dict[str, Any]]:
    return [row for row in rows if (row["model"], row["method"]) == (model, method)]


def draw(rows: list[dict[str, Any]]) -> None:
    """Bars: a token's FLOPs by part, small and XL. Lines: the cache of one row by sparsity."""
    titles = [f"FLOPs of one more token, {name}, context {CONTEXT:,}" for name in MODELS[::3]]
    figure, axes = panels([*titles, "Cache of one row, MiB (dashed: dense)"], width=4.8)
    for axis, model in zip(axes[:2], MODELS[::3], strict=True):
        pruned = [r for r in rows_of(rows, model, "pruned") if r["sparsity"] in (0.5, 0.8, 0.95)]
        bars = [*rows_of(rows, model, "dense"), *pruned]
        names = [*["dense"], *(f"{row['sparsity']:.0%}" for row in pruned)]
        base = [0.0] * len(bars)
        for number, part in enumerate(PARTS):
            heights = [row["flops"][part] / 1e6 for row in bars]
            if any(heights):
                axis.bar(names, heights, 0.62, base, color=COLOURS[number], label=part)
            base = [low + height for low, height in zip(base, heights, strict=True)]
        axis.set(ylabel="million FLOPs", xlabel="context pruned")
        axis.grid(visible=False, axis="x")
    legend(axes[1], -1, loc="center left", bbox_to_anchor=(1, 0.5))
    for number, model in enumerate(MODELS):
        pruned = rows_of(rows, model, "pruned")
        x = [100 * row["sparsity"] for row in pruned]
        line(axes[2], number, x, [row["cache_bytes"] / 2**20 for row in pruned], model)
        dense = rows_of(rows, model, "dense")[0]["cache_bytes"] / 2**20
        axes[2].axhline(dense, color=COLOURS[number], linestyle=(0, (4, 3)), linewidth=1)
    axes[2].set(xlabel="context pruned, %", ylim=(0, None))
    legend(axes[2])
    save_figure(figure, "flops_memory")


if __name__ == "__main__":
    main()
