"""How many rows fit beside the weights, and what a step must read: the paper's Fig. 7, by formula.

    python -m experiments.largest_batches     writes docs/results/largest_batches.json

For the four GPT-2 sizes on a GPU with 24 GB, as the paper's, float16: the largest batch whose
weights and caches (interaction keys and slack included) fit, at each context and in the mean over
contexts. A step of decoding reads weights and caches once; where nothing but that reading takes
time, tokens/s are batch / bytes, and their ratio to dense is a limit, not a measurement: kernels,
activations, logits and votes are left out. No GPU was used.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.flops_memory import MODELS, RANK
from experiments.publish import publish
from kvprune.evaluate.cost.formulas import cost
from kvprune.evaluate.cost.shape import read_shape

MEMORY = 24 * 10**9
CONTEXTS = (64, 128, 256, 512, 768, 1000)
SPARSITIES = (0.5, 0.8, 0.9)
MEAN = "mean"


def main() -> None:
    rows = [row for model in MODELS for row in of_model(model)]
    publish("largest_batches", {"memory": MEMORY, "rank": RANK, "dtype": "float16"}, rows)
    for row in rows:
        if row["context"] in (1000, MEAN):
            print(f"{row['model']:12} {row['sparsity']:4.0%} at {row['context']!s:>5}: "
                  f"{row['batch']:7.0f} rows, {row['batch_ratio']:.2f} × dense's; tokens/s at most "
                  f"{row['limit']:.2f} ×")  # fmt: skip


def of_model(model: str) -> list[dict[str, Any]]:
    """Rows by sparsity and context; the mean over contexts is of batches and of limits."""
    shape = read_shape(model, "float16")
    held = {
        (0.0 if row["method"] == "dense" else row["sparsity"], row["context"]): row
        for row in cost(shape, SPARSITIES, CONTEXTS, (1,), RANK)
    }
    rows: list[dict[str, Any]] = []
    for sparsity in (0.0, *SPARSITIES):
        own: list[dict[str, Any]] = []
        for context in CONTEXTS:
            dense, speed = (per_second(held[share, context]) for share in (0.0, sparsity))
            own.append({
                "model": model, "sparsity": sparsity, "context": context, "batch": speed[0],
                "batch_ratio": speed[0] / dense[0], "limit": speed[1] / dense[1],
            })  # fmt: skip
        means = {
            name: fmean(row[name] for row in own) for name in ("batch", "batch_ratio", "limit")
        }
        rows += [*own, {"model": model, "sparsity": sparsity, "context": MEAN, **means}]
    return rows


def per_second(row: dict[str, Any]) -> tuple[int, float]:
    """The largest batch, and its tokens per byte read."""
    batch = int((MEMORY - row["weight_bytes"]) // row["cache_bytes_most"])
    return batch, batch / (row["weight_bytes"] + batch * row["cache_bytes"])


if __name__ == "__main__":
    main()
