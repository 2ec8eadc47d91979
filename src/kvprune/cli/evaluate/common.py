"""What the commands of kvprune eval print: tables, and the files they wrote."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path


def table(
    title: str, columns: list[str], rows: Iterable[list[str]], left: int = 1, last: int = 0
) -> None:
    """Print to stdout; the first `left` columns are text, the others numbers, aligned right.

    A line separates the `last` rows, which sum up the others.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn, cells = Table(title=Text(title), title_justify="left"), list(rows)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for number, row in enumerate(cells, 1):
        drawn.add_row(*map(Text, row), end_section=number == len(cells) - last)
    # a file or a pipe has no width: never break a row there
    Console(width=None if sys.stdout.isatty() else 200).print(drawn)


def print_written(files: Iterable[Path]) -> None:
    """Name the files on stderr."""
    for file in files:
        print(f"wrote {file}", file=sys.stderr)
