"""kvprune eval perplexity: how well a model predicts, and how much it drops, by context size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvprune.cli.evaluate.common import table
from kvprune.cli.names import AdapterName, ModelName, check_model
from kvprune.utils.malloc import keep_memory
from kvprune.utils.parse import numbers
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.evaluate.perplexity.measure import AtContext
    from kvprune.evaluate.perplexity.run import Measured


def perplexity(
    model: ModelName,
    data: Annotated[
        str | None, typer.Option(help="Text: a file, folder, pattern or hub dataset.")
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(
            help="Folder or recipe of a run: read only what it held out. Or a share or rows: "
            "read that part of --data."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Take at most this many of --data, as training did.", min=1)
    ] = None,
    adapter: AdapterName = None,
    length: Annotated[
        int | None,
        typer.Option(help="Tokens per window.", show_default="the model's, at most 1024", min=2),
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(
            help="Tokens from one window to the next; the others are context only.", min=1
        ),
    ] = None,
    contexts: Annotated[
        str | None, typer.Option(help="Context sizes, such as 64,128.", show_default="1,2,4,...")
    ] = None,
    max_windows: Annotated[int | None, typer.Option(help="Read at most this many.", min=1)] = None,
    dense: Annotated[bool, typer.Option(help="Compare with the dense model.")] = True,
    dense_model: Annotated[
        str | None,
        typer.Option(
            help="The dense model to compare with.",
            show_default="its base model",
            callback=check_model,
        ),
    ] = None,
    path: Annotated[str, typer.Option(help="full; or cached, as in generation.")] = "full",
    chunk: Annotated[int, typer.Option(help="Tokens read at once with --path cached.", min=1)] = 64,
    batch: Annotated[int, typer.Option(help="Windows read at once.", min=1)] = 4,
    text_field: Annotated[
        str, typer.Option(help="Field that holds the text in JSON, parquet and hub rows.")
    ] = "text",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...", show_default="cuda if available")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for numbers and figures; resumes from it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure perplexity and sparsity by context size, compared with the dense model."""
    sizes = None if contexts is None else numbers(contexts, int, "--contexts")

    from kvprune.evaluate.perplexity.run import run
    from kvprune.utils.processes import launched

    quiet()
    keep_memory()
    with launched() as group:
        measured = run(
            model, data, held_out=held_out, max_tokens=max_tokens, adapter=adapter,
            length=length, stride=stride, contexts=sizes,
            max_windows=max_windows, dense=dense, dense_model=dense_model, path=path, chunk=chunk,
            batch=batch, text_field=text_field, dtype=dtype, device=device, out=out, group=group,
        )  # fmt: skip
    if not group.is_main:
        return
    if as_json:
        print(json.dumps(measured.to_dict()))
    else:
        _show(measured)
    if out is not None:
        print(f"wrote perplexity.json, .png and .svg in {out}", file=sys.stderr)


def _show(measured: Measured) -> None:
    about, rows = measured.about, measured.rows
    names = ["context", "tokens", "perplexity", "pruned at it", "pruned, mean"]
    if rows[0].kl is not None:
        names += ["dense perplexity", "KL", "same token"]
    title = f"{about['windows']} windows of {about['length']} tokens"
    table(
        f"{about['adapter'] or about['model']} on {about['data']}: {title}",
        names, map(_cells, rows), left=0, last=1,
    )  # fmt: skip


def _cells(row: AtContext) -> list[str]:
    scored = "" if row.sparsity_scored is None else f"{row.sparsity_scored:.1%}"
    cells = [
        str(row.context), f"{row.tokens:,}", f"{row.perplexity:.2f}", f"{row.sparsity:.1%}", scored
    ]  # fmt: skip
    if row.dense_perplexity is not None and row.kl is not None and row.same is not None:
        cells += [f"{row.dense_perplexity:.2f}", f"{row.kl:.4f}", f"{row.same:.1%}"]
    return cells
