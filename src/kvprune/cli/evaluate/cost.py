"""kvprune eval cost: FLOPs and cache bytes by formula, without any weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.cli.evaluate.common import print_written, table
from kvprune.cli.names import ConfigName
from kvprune.utils.amounts import operations, size
from kvprune.utils.parse import numbers
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.evaluate.cost.shape import Shape


def cost(
    model: ConfigName,
    sparsity: Annotated[
        str, typer.Option(help="Shares of the context that are dropped.")
    ] = "0,0.5,0.8",
    context: Annotated[str, typer.Option(help="Tokens before the new one.")] = "256,512,1024",
    batch: Annotated[str, typer.Option(help="Rows of the cache.")] = "1",
    rank: Annotated[int, typer.Option(help="Width r of the interaction keys.", min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="Of keys and values; auto: as the model.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder for cost.json, cost.png and cost.svg.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute FLOPs per token and cache bytes, dense and pruned, from a configuration alone."""
    sparsities = numbers(sparsity, float, "--sparsity")
    contexts, batches = numbers(context, int, "--context"), numbers(batch, int, "--batch")

    from kvprune.evaluate.cost import formulas as costs
    from kvprune.evaluate.cost.shape import read_shape
    from kvprune.evaluate.points import Points
    from kvprune.version import __version__

    quiet()
    shape = read_shape(model, dtype)
    about = {"measured": "cost", "kvprune": __version__, "model": model, "dtype": shape.dtype,
             "rank": rank, "layers": len(shape.layers), "parameters": shape.parameters}  # fmt: skip
    # nothing to resume: all of it takes a second
    points = Points(None, about)
    points.measure(
        {"model": model, "rank": rank},
        lambda: costs.cost(shape, sparsities, contexts, batches, rank),
    )
    if out is not None:
        from kvprune.evaluate.cost.figure import draw
        from kvprune.utils.plot import save

        print_written([points.write(out / "cost.json"), *save(draw(points.rows), out / "cost")])
    if as_json:
        print(json.dumps(points.document))
    else:
        _show(shape, points.rows)


def _show(shape: Shape, rows: list[dict[str, Any]]) -> None:
    from kvprune.evaluate.cost.formulas import PARTS

    largest = max(row["context"] for row in rows)
    first = rows[0]["batch"]
    shown = [row for row in rows if (row["context"], row["batch"]) == (largest, first)]
    names = [_side(row) for row in shown]
    for key, what in (("flops", "one more token"), ("flops_prefill", "a prompt")):
        totals = [sum(row[key].values()) for row in shown]
        lines = [[part, *(operations(row[key][part]) for row in shown)] for part in PARTS]
        lines += [["total", *(operations(total) for total in totals)]]
        lines += [["against dense", *(f"{total / totals[0]:.3f} ×" for total in totals)]]
        table(f"{shape.name}: FLOPs of {what}, context {largest:,}", ["", *names], lines)
    table(
        f"{shape.name}: bytes of the cache, {shape.dtype}; weights "
        f"{size(rows[0]['weight_bytes'])}",
        ["context", "batch", "", "keys + values", "interaction", "bookkeeping", "total",
         "against dense", "with slack, at most"],
        ([f"{row['context']:,}", str(row["batch"]), _side(row), *_bytes(row)] for row in rows),
        left=3,
    )  # fmt: skip


def _side(row: dict[str, Any]) -> str:
    return "dense" if row["method"] == "dense" else f"pruned {row['sparsity']:.0%}"


def _bytes(row: dict[str, Any]) -> list[str]:
    parts = row["bytes"]
    states = parts["keys"] + parts["values"] + parts["left_alone"]
    shown = (states, parts["interaction_keys"], parts["bookkeeping"], row["cache_bytes"])
    return [*map(size, shown), f"{row['cache_ratio']:.3f} ×", size(row["cache_bytes_most"])]
