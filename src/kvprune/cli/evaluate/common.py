"""What the commands of kvprune eval share: lists and sizes as options, tables, talk."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from kvprune.errors import PruneError

N = TypeVar("N", int, float)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
         "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip


def numbers(text: str, kind: Callable[[str], N], option: str) -> list[N]:
    """'1,8,32' as [1, 8, 32]; no duplicates."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise PruneError(f"{option} {text!r} must be {what} with commas between them") from None


def in_bytes(text: str, option: str) -> int:
    """'4GB' as bytes; GiB are 2^30."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)B?\s*", text.upper())
    try:
        assert match is not None
        return int(float(match[1]) * UNITS[match[2]])
    except (AssertionError, ValueError, KeyError):
        raise PruneError(f"{option} {text!r} must be a size such as 4GB or 512MiB") from None


def table(
    title: str, columns: list[str], rows: Iterable[list[str]], left: int = 1, last: int = 0
) -> None:
    """To stdout: the first `left` columns to the left, numbers to the right; a line before the
    `last` rows, which sum up."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made, cells = Table(title=Text(title), title_justify="left"), list(rows)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right", no_wrap=True)
    for number, row in enumerate(cells, 1):
        made.add_row(*map(Text, row), end_section=number == len(cells) - last)
    # a file or a pipe has no width: never break a row there
    Console(width=None if sys.stdout.isatty() else 200).print(made)


def told(files: Iterable[Path]) -> None:
    """Say on stderr what was written."""
    for file in files:
        print(f"wrote {file}", file=sys.stderr)
