"""kvprune demo: train the small model to prune, and compare it with the dense one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.demo import Run


def demo(
    steps: Annotated[int, typer.Option(help="Training steps of 2,048 tokens.", min=2)] = 50,
    gamma: Annotated[float, typer.Option(help="How strongly to prune.", min=0)] = 0.2,
    seed: Annotated[int, typer.Option(help="Seed for new weights and the order of the text.")] = 0,
    save: Annotated[Path | None, typer.Option(help="Save the pruned model in this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train the small model of the package to prune, and compare it with the dense one."""
    import sys

    from kvprune.demo import run

    quiet()
    print("Teaching a small language model to forget ...", file=sys.stderr)
    result = run(steps, gamma, seed, save)
    if as_json:
        print(json.dumps(asdict(result)))
    else:
        _show(result, save)


def _show(result: Run, folder: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    dense, pruned = result.dense, result.pruned
    table = Table(
        title=f"\n{result.model}, fine-tuned for {result.steps} steps ({result.tokens:,} tokens) "
        f"in {result.seconds:.0f} s",
        title_justify="left",
    )
    table.add_column("")
    for name in ("dense", "pruned", "pruned / dense"):
        table.add_column(name, justify="right")

    def row(name: str, a: float, b: float, form: str) -> None:
        table.add_row(name, form.format(a), form.format(b), f"{b / a:.2f} ×")

    row("perplexity, a book it never saw", dense.perplexity, pruned.perplexity, "{:.2f}")
    for context, share in pruned.sparsity.items():
        table.add_row(f"context pruned at {context} tokens", "0 %", f"{100 * share:.0f} %", "")
    row("cache, MiB", dense.cache_bytes / 2**20, pruned.cache_bytes / 2**20, "{:.1f}")
    row("tokens/s, 16 rows", dense.tokens_per_second, pruned.tokens_per_second, "{:.0f}")
    console.print(table)
    for name, model in (("dense", dense), ("pruned", pruned)):
        console.print(f"\n[bold]{name}[/]: {result.prompt}[cyan]", end="")
        console.print(model.text, style="cyan", markup=False, highlight=False)
    if folder is not None:
        console.print(f"\nKept in {folder}: [bold]kvprune generate {folder} ...[/]", markup=True)
