"""Throughput and memory of batched generation at a long context: transformers' caches against ours.

    python -m experiments.smollm2.speed MODEL ADAPTER... --text held_out_book.txt
    kvprune eval throughput ... --memory 4GB        the same for one adapter and any model

All caches of a batch are in memory together and decode in turn (kvprune.evaluate.throughput.run);
ours has read real text, different in each row. In bfloat16 on a CPU without instructions for it,
the matrix products outside of attention are computed in float32 for every contestant
(kvprune.evaluate.throughput.bfloat16).
Then, by formula (kvprune.evaluate.cost): the largest batch whose weights and cache fit into 4 GB,
by context; the formula is compared with the storages of a real cache.
It resumes where it stopped; rows in docs/results/smollm2_speed.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from experiments.publish import publish
from experiments.smollm2 import common
from experiments.smollm2.common import Adapter, Row, table
from kvprune.cache.nbytes import nbytes
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.evaluate.cost.formulas import cache_bytes
from kvprune.evaluate.cost.shape import Shape, read_shape
from kvprune.evaluate.throughput.bfloat16 import is_emulated, multiply_in_float32
from kvprune.evaluate.throughput.contestants import realistic
from kvprune.evaluate.throughput.models import ModelPair, load_pair
from kvprune.evaluate.throughput.run import REALISTIC, Sweep, throughput
from kvprune.evaluate.throughput.timing import machine, versions
from kvprune.utils.amounts import size
from kvprune.utils.parse import numbers
from kvprune.utils.quiet import quiet

DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="text to read: .txt or .txt.gz")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--steps", type=int, default=4, help="tokens in a timed call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--memory", type=float, default=4.0, help="GB for weights and cache")
    parser.add_argument("--fit-contexts", default="512,1024,2048,4096,8192")
    args = parser.parse_args()
    quiet()
    rows = [*timed(args), *checked(args)]
    publish("smollm2_speed", {"machine": machine(), "versions": versions()}, rows, args.docs)
    show(rows)


def timed(args: argparse.Namespace) -> Iterator[Row]:
    """One row per dtype, strength, batch and side."""
    sweep = Sweep(
        contexts=(args.context,), batches=tuple(numbers(args.batches, int, "--batches")),
        sparsities=(), static=True, steps=args.steps, repeats=args.repeats,
    )  # fmt: skip
    for dtype in args.dtypes.split(","):
        for adapter in adapters(args):
            about = {"dtype": dtype, "adapter": adapter.digest, "context": args.context}
            about |= {"steps": args.steps, "repeats": args.repeats}
            points = common.points(args, f"speed-{adapter.name}-{dtype}", **about)
            models = load(args, adapter, dtype)
            for row in throughput(models, sweep, points):
                print(line(row, dtype, adapter.name), flush=True)
                yield {"measured": "speed", "dtype": dtype, "strength": adapter.name, **row}


def adapters(args: argparse.Namespace) -> list[Adapter]:
    return [Adapter(folder.name, folder, common.digest(folder)) for folder in args.adapters]


def load(args: argparse.Namespace, adapter: Adapter, dtype: str) -> ModelPair:
    models = load_pair(str(args.model), str(adapter.folder), args.text, dtype)
    if dtype == "bfloat16" and is_emulated():
        assert models.pruned is not None
        for model in {id(m): m for m in (models.dense, models.pruned.model)}.values():
            multiply_in_float32(model)
    return models


def checked(args: argparse.Namespace) -> Iterator[Row]:
    """What fits, by formula; and the formula against one real cache per strength."""
    for adapter in adapters(args):
        models = load(args, adapter, "float32")
        assert models.pruned is not None
        rank = models.pruned.rank
        contexts = numbers(args.fit_contexts, int, "--fit-contexts")
        gone = {n: sparsity(models, n) for n in contexts}
        yield against_storages(args, models, adapter, rank)
        for dtype in args.dtypes.split(","):
            shape = read_shape(args.model, dtype)
            for context in contexts:
                yield fits(shape, context, gone[context], rank, adapter.name, args.memory)


def sparsity(models: ModelPair, context: int) -> float:
    """Sparsity of one row of the text after `context` tokens."""
    cache = pruned_cache(models, 1, context)
    return 1 - float(cache.kept.float().mean()) / context


def pruned_cache(models: ModelPair, batch: int, context: int) -> PrunedCache:
    """A cache that has read real text."""
    cache = realistic(models)[-1].cache(batch, context, 0)
    assert isinstance(cache, PrunedCache)
    return cache


def against_storages(
    args: argparse.Namespace, models: ModelPair, adapter: Adapter, rank: int
) -> Row:
    """Bytes of a cache of two rows, as allocated and by the formula."""
    batch, context = 2, args.context
    cache = pruned_cache(models, batch, context)
    gone = 1 - float(cache.kept.float().mean()) / context
    shape = read_shape(args.model, "float32")
    formula = {
        f"bytes_{slack}": cache_bytes(shape, context, gone, batch, rank, slack).total
        for slack in ("none", "most")
    }
    dense = realistic(models)[0].cache(batch, context, 0)
    own = {"measured": "storages", "dtype": "float32", "strength": adapter.name}
    return {
        **own, "context": context, "batch": batch, "sparsity": gone, "bytes": nbytes(cache),
        **formula, "dense_bytes": nbytes(dense),
        "dense_formula": cache_bytes(shape, context, batch=batch).total,
    }  # fmt: skip


def fits(shape: Shape, context: int, gone: float, rank: int, strength: str, memory: float) -> Row:
    """The largest batch of each side; ours with all the slack that its storage may have."""
    weights = shape.parameters * torch.empty(0, dtype=getattr(torch, shape.dtype)).element_size()
    room = memory * 1e9 - weights
    dense = cache_bytes(shape, context).total
    ours = cache_bytes(shape, context, gone, 1, rank, "most").total
    own = {"measured": "fits", "dtype": shape.dtype, "strength": strength, "context": context}
    return {
        **own, "memory": memory, "sparsity": gone, "dense_row_bytes": dense, "row_bytes": ours,
        "dense_batch": max(0, int(room // dense)), "batch": max(0, int(room // ours)),
    }  # fmt: skip


def line(row: Row, dtype: str, strength: str) -> str:
    ratio = "" if row["ratio"] is None else f"  {row['ratio']:.2f} × dense"
    return (
        f"{dtype:9} {strength:12} batch {row['batch']:3}  {row['side']:14} "
        f"{row['tokens_per_second']:8.1f} tokens/s  {size(row['cache_bytes']):>10}{ratio}"
    )


def show(rows: list[Row]) -> None:
    speed = [row for row in rows if row["measured"] == "speed" and row["rows"] == REALISTIC]
    table(
        ["dtype", "strength", "batch", "side", "pruned", "cache", "tokens/s", "× DynamicCache"],
        [
            [row["dtype"], row["strength"], str(row["batch"]), row["side"],
             f"{row['sparsity']:.0%}", size(row["cache_bytes"]),
             f"{row['tokens_per_second']:.1f}", f"{row['ratio']:.2f}"]
            for row in speed
        ],
    )  # fmt: skip
    print()
    table(
        ["dtype", "strength", "context", "pruned", "rows, dense", "rows, ours"],
        [
            [row["dtype"], row["strength"], f"{row['context']:,}", f"{row['sparsity']:.0%}",
             str(row["dense_batch"]), str(row["batch"])]
            for row in rows
            if row["measured"] == "fits"
        ],
    )  # fmt: skip
    for row in rows:
        if row["measured"] == "storages":
            print(
                f"\n{row['strength']}: a cache of {row['batch']} × {row['context']:,} tokens takes "
                f"{size(row['bytes'])}; by formula {size(row['bytes_none'])} to "
                f"{size(row['bytes_most'])}; dense {size(row['dense_bytes'])}, by formula "
                f"{size(row['dense_formula'])}"
            )


if __name__ == "__main__":
    main()
