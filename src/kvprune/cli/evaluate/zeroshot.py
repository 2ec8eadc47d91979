"""kvprune eval zeroshot: the paper's four tasks; kvprune eval lm-eval: all of lm-eval's."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvprune.cli.evaluate.common import table
from kvprune.cli.names import AdapterName, ModelName
from kvprune.utils.malloc import keep_memory
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.evaluate.zeroshot.run import Measured


def zeroshot(
    model: ModelName,
    adapter: AdapterName = None,
    tasks: Annotated[
        str, typer.Option(help="Any of these four.")
    ] = "winogrande,hellaswag,piqa,lambada",
    files: Annotated[
        Path | None,
        typer.Option(help="Folder with one file per task.", show_default="from the hub"),
    ] = None,
    limit: Annotated[
        str | None,
        typer.Option(help="Samples per task: 200 for all, or hellaswag=1000,piqa=200."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Requests read at once.", min=1)] = 8,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, ...", show_default="cuda if available")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the numbers; resumes from it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure accuracy on WinoGrande, HellaSwag, PIQA and LAMBADA, and sparsity."""
    from kvprune.evaluate.zeroshot.run import run
    from kvprune.utils.processes import launched

    first = None if limit is None else _limit(limit)
    quiet()
    keep_memory()
    # it warns about what is intended here
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with launched() as group:
        measured = run(
            model, adapter=adapter, tasks=tasks.split(","), files=files, limit=first, batch=batch,
            dtype=dtype, device=device, out=out, group=group,
        )  # fmt: skip
    if not group.is_main:
        return
    if as_json:
        print(json.dumps(measured.to_dict()))
    else:
        _show(measured)
    if out is not None:
        print(f"wrote zeroshot.json in {out}", file=sys.stderr)


def _limit(text: str) -> int | dict[str, int]:
    """'200' as 200, 'hellaswag=1000,piqa=200' as a number per task."""
    from kvprune.errors import PruneError

    try:
        if "=" not in text:
            return int(text)
        pairs = [part.split("=") for part in text.split(",")]
        return {task.strip(): int(first) for task, first in pairs}
    except ValueError:
        raise PruneError(
            f"--limit {text!r} must be a number, or one per task: hellaswag=1000,piqa=200"
        ) from None


def lm_eval(context: typer.Context) -> None:
    """Run lm-eval's own command: --model_args pretrained=M,adapter=A --tasks ..."""
    from kvprune.errors import PruneError
    from kvprune.utils.processes import refuse_many

    refuse_many("kvprune eval lm-eval")
    try:
        from lm_eval.__main__ import cli_evaluate

        import kvprune.evaluate.zeroshot.tasks  # noqa: F401  registers the model
    except ImportError as error:
        raise PruneError(
            f"this needs the package lm-eval ({error}); pip install 'kvprune[eval]'"
        ) from error
    sys.argv = ["lm_eval", "--model", "kvprune", *context.args]
    cli_evaluate()


def _show(measured: Measured) -> None:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.2%}"

    table(
        measured.about["adapter"] or measured.about["model"],
        ["task", "samples", "accuracy", "±", "normed", "pruned"],
        (
            [row.task, f"{row.samples:,}", *map(share, (row.accuracy, row.stderr)),
             *map(share, (row.accuracy_norm, row.sparsity))]
            for row in measured.rows
        ),
        last=1,
    )  # fmt: skip
