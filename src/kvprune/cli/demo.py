"""kvprune demo: see open gates change nothing and closed gates forget."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvprune.demo import Run


def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    seed: Annotated[int, typer.Option(help="Of the model's random weights.")] = 0,
) -> None:
    """Attach pruning to a small model made on the spot, and look at what it forgets."""
    from kvprune.demo import run

    result = run(seed)
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        _show(result)


def _show(result: Run) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(
        f"\n[bold]A {result.model}[/], random weights, {result.texts} texts as one batch."
    )
    console.print(
        f"Open gates (β = 1000): logits differ by at most "
        f"[bold]{result.open_difference:.1e}[/]; after detach by {result.detached_difference:.0e}."
    )

    table = Table(title="\nClosing the gates", title_justify="left")
    for name in ("β", "context pruned", "least, most pruned layer", "cache", "of dense"):
        table.add_column(name, justify="right")
    for row in result.rows:
        table.add_row(
            f"{row.beta:g}",
            f"{row.sparsity:.0%}",
            f"{min(row.per_layer):.0%}, {max(row.per_layer):.0%}",
            f"{row.cache_bytes / 1024:.1f} KiB",
            f"{row.cache_bytes / row.dense_bytes:.0%}",
        )
    console.print(table)

    console.print(
        f"\nWhat each layer still holds at the end of a text (β = {result.shown_beta:g}):"
    )
    for layer, kept in enumerate(result.kept):
        line = Text(f"  layer {layer}  ", style="cyan")
        for letter, stays in zip(result.text, kept, strict=True):
            line.append(letter if stays else "·", style="bold" if stays else "dim")
        console.print(line, soft_wrap=True)
    console.print(
        "\n[dim]Nothing was trained, so what it forgets means nothing yet; that it forgets, "
        "exactly and for good, is the point.[/]"
    )
