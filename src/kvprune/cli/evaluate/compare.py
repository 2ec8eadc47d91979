"""kvprune eval compare: results of the other commands, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvprune.cli.evaluate.common import print_written, table


def compare(
    results: Annotated[
        list[Path], typer.Argument(help="Folders or JSON files written by eval --out.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for compare.html, .png, .svg and .json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare several models in one table, figure and page: quality, bytes, speed."""
    from kvprune.evaluate.compare.tables import compare as run
    from kvprune.evaluate.compare.tables import summary_table

    rows, files = run(results, out)
    print_written(files)
    if as_json:
        print(json.dumps({"rows": rows}))
    else:
        columns, lines = summary_table(rows)
        table("Models side by side", columns, lines, left=2)
