"""kvprune eval throughput: tokens/s and the time of a step, dense against pruned."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.cli.evaluate.common import print_written, table
from kvprune.cli.names import ConfigName, check_adapter
from kvprune.utils.amounts import size
from kvprune.utils.parse import in_bytes, numbers
from kvprune.utils.processes import refuse_many
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.evaluate.points import Points


def throughput(
    model: ConfigName,
    adapter: Annotated[
        str | None,
        typer.Option(
            help="Folder written by Pruned.save: also measure its decisions.",
            callback=check_adapter,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="Tokens read before decoding.", show_default="up to the model's"),
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Rows decoded together.", show_default="1,8,32; with --memory 1,2,4,..."),
    ] = None,
    sparsity: Annotated[
        str, typer.Option(help="Of ideal rows, which all hold the same number of tokens.")
    ] = "0.8",
    baseline: Annotated[
        str,
        typer.Option(help="On ideal rows: local,strided,streaming,tova,h2o,snapkv,keynorm."),
    ] = "",
    memory: Annotated[
        str | None, typer.Option(help="Limit for weights and cache of one model, such as 4GB.")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Also measure a StaticCache.")] = False,
    random: Annotated[
        bool, typer.Option("--random", help="Use random weights: speed needs no trained ones.")
    ] = False,
    text: Annotated[
        Path | None, typer.Option(help="Text to read: .txt or .txt.gz.", show_default="a book")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    rank: Annotated[
        int, typer.Option(help="Width of interaction keys if there is no adapter.", min=1)
    ] = 64,
    steps: Annotated[int, typer.Option(help="Tokens per timed call.", min=1)] = 4,
    repeats: Annotated[int, typer.Option(help="Rounds.", min=1)] = 5,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for throughput.json, .png and .svg; resumes from it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure tokens/s of dense and pruned decoding, by context and batch."""
    refuse_many("kvprune eval throughput")
    contexts = tuple(numbers(context, int, "--context")) if context else None
    limit = in_bytes(memory, "--memory") if memory else None
    default = "1,2,4,8,16,32,64,128,256" if limit else "1,8,32"
    batches = tuple(numbers(batch or default, int, "--batch"))
    sparsities = tuple(numbers(sparsity, float, "--sparsity")) if sparsity else ()

    from kvprune.evaluate.points import Points
    from kvprune.evaluate.throughput.models import load_pair
    from kvprune.evaluate.throughput.run import Sweep, default_contexts
    from kvprune.evaluate.throughput.run import throughput as run
    from kvprune.evaluate.throughput.timing import machine, versions

    quiet()
    models = load_pair(model, adapter, text, dtype, random)
    sweep = Sweep(
        contexts or default_contexts(models, steps * (repeats + 1)), batches, sparsities,
        tuple(part for part in baseline.split(",") if part), static, limit, rank, steps, repeats,
    )  # fmt: skip
    about = {
        "measured": "throughput", "model": model, "adapter": adapter, "memory": limit,
        "dtype": str(models.dense.dtype).removeprefix("torch."), "steps": steps,
        "repeats": repeats, "baselines": list(sweep.baselines), "static": static,
        "random": random, "machine": machine(), "versions": versions(),
    }  # fmt: skip
    points = Points(out / "throughput.json" if out else None, about)
    run(models, sweep, points, _track)
    if out is not None:
        from kvprune.evaluate.throughput.figure import draw
        from kvprune.utils.plot import save

        print_written(
            [out / "throughput.json", *save(draw(points.rows, model), out / "throughput")]
        )
    if as_json:
        print(json.dumps(points.document))
    else:
        _show(points, model)


def _track(settings: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    from rich.console import Console
    from rich.progress import track

    return track(settings, "Decoding", console=Console(stderr=True), transient=True)


def _show(points: Points, model: str) -> None:
    from kvprune.evaluate.compare.results import best

    about = points.about
    print("{cpu}, {cores} cores, {system}".format(**about["machine"]), file=sys.stderr)
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    print(versions, file=sys.stderr)
    table(
        f"{model}, {about['dtype']}: decoding, medians of {about['repeats']} rounds (spread)",
        ["rows", "context", "batch", "side", "pruned", "cache", "ms per step", "tokens/s",
         "against dense"],
        (
            [_kind(row), f"{row['context']:,}", str(row["batch"]), row["side"],
             f"{row['sparsity']:.0%}", size(row["cache_bytes"]), _step(row),
             f"{row['tokens_per_second']:.1f}", _ratio(row)]
            for row in points.rows
        ),
        left=4,
    )  # fmt: skip
    within = f" within {size(about['memory'])}" if about["memory"] else ""
    table(
        f"{model}: each at its best batch{within}",
        ["rows", "context", "side", "batch", "tokens/s", "against dense at its best"],
        (
            [_kind(row), f"{row['context']:,}", row["side"], str(row["batch"]),
             f"{row['tokens_per_second']:.1f}",
             "-" if row["best_ratio"] is None else f"{row['best_ratio']:.2f} ×"]
            for row in best(points.rows)
        ),
        left=3,
    )  # fmt: skip


def _kind(row: dict[str, Any]) -> str:
    return row["rows"] if row.get("at") is None else f"{row['rows']} {row['at']:.0%}"


def _step(row: dict[str, Any]) -> str:
    middle, low, high = (
        row[name] * 1000 for name in ("seconds_step", "seconds_step_low", "seconds_step_high")
    )
    return f"{middle:.2f} ({low:.2f}–{high:.2f})"


def _ratio(row: dict[str, Any]) -> str:
    if row["ratio"] is None:
        return "-"
    return f"{row['ratio']:.2f} × ({row['ratio_low']:.2f}–{row['ratio_high']:.2f})"
