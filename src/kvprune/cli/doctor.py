"""kvprune doctor: what this machine has, which kernels it uses, whether they are right and fast."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console

    from kvprune.doctor import Report
    from kvprune.doctor.report import Fact, Test

Cell: TypeAlias = "str | tuple[str, str]"  # a text, or a text and its style
CHOICES = ["operation", "for", "dtypes", "by", "because"]


def doctor(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda (ROCm too), cuda:1, ...")] = "auto",
    test: Annotated[bool, typer.Option(help="Test each kernel against its reference.")] = True,
    speed: Annotated[bool, typer.Option(help="Measure how fast memory and decoding are.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at this machine: what it has, which kernels it will use and why, if they are right.

    Exit code 1 if a kernel's results differ from its reference.
    """
    from kvprune.doctor import examine

    quiet()
    report = examine(device, test, speed, lambda what: print(f"{what} ...", file=sys.stderr))
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        _show(report)
    if report.failed:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape

    # a file or a pipe has no width: never break a row there
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    _facts(console, f"machine, device {report.device}", report.machine)
    packages = "  ".join(f"{name} {number}" for name, number in report.versions.items())
    console.print(f"\n[bold]versions[/]\n  {packages}", soft_wrap=True)
    if report.extras:
        complete = ", ".join(f.name for f in report.extras if f.good) or "none"
        console.print(f"\n[bold]extras[/]\n  installed: {complete}", soft_wrap=True)
        for fact in report.extras:
            if not fact.good:
                console.print(f"  {fact.name}: [yellow]{fact.value}[/] [dim]{escape(fact.note)}[/]")
    _facts(console, "models", report.models)
    _table(console, "what runs", CHOICES, _choices(report))
    if report.tests:
        columns = ["kernel", "by", "dtype", "largest error", "allowed", ""]
        _table(console, "each kernel against plain torch", columns, map(_tested, report.tests), 3)
    if report.speeds:
        rows = (
            [s.name, f"{s.bytes_per_second / 1e9:.1f}", "" if s.share is None else f"{s.share:.0%}"]
            for s in report.speeds
        )
        columns = ["one layer's step", "GB/s", "of the best"]
        _table(console, "memory", columns, rows, 1)
    if report.tests:
        failed = len(report.failed)
        verdict = (
            f"[red]{failed} of {len(report.tests)} self-tests failed[/]"
            if failed
            else f"[green]all {len(report.tests)} self-tests passed[/]"
        )
        console.print(f"\n{verdict}")


def _choices(report: Report) -> Iterable[Sequence[Cell]]:
    before = ""
    for choice in report.choices:
        again = choice.operation == before
        before = choice.operation
        yield [
            "" if again else choice.operation, "" if again else choice.used_for,
            ", ".join(choice.dtypes), choice.backend, (choice.why, "yellow"),
        ]  # fmt: skip


def _facts(console: Console, title: str, facts: list[Fact]) -> None:
    colours = {True: "green", False: "yellow", None: ""}
    rows: list[list[Cell]] = [[f.name, (f.value, colours[f.good]), (f.note, "dim")] for f in facts]
    _table(console, title, None, rows)


def _tested(test: Test) -> list[Cell]:
    state = ("ok", "green") if test.passed else (test.problem or "wrong", "bold red")
    error = "" if test.problem else f"{test.error:.1e}" if test.error else "0"
    allowed = f"{test.allowed:.0e}" if test.allowed else "0"
    return [test.operation, test.backend, test.dtype, error, allowed, state]


def _table(
    console: Console,
    title: str,
    columns: list[str] | None,
    rows: Iterable[Sequence[Cell]],
    left: int = 5,
) -> None:
    """A section: cells are texts, or texts with a style; after `left` of them, numbers."""
    from rich.table import Table
    from rich.text import Text

    cells = list(rows)
    names = columns or [""] * len(cells[0])
    drawn = Table(box=None, show_header=columns is not None, header_style="dim", padding=(0, 2))
    for number, name in enumerate(names):
        right = left <= number < len(names) - 1 or (name and number >= left)
        drawn.add_column(name, justify="right" if right else "left")
    for row in cells:
        texts = [Text(*cell) if isinstance(cell, tuple) else Text(cell) for cell in row]
        drawn.add_row(*texts)
    console.print(f"\n[bold]{title}[/]")
    console.print(drawn)
