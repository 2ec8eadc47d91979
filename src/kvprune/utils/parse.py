"""Options that hold several numbers, or a size."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from kvprune.errors import PruneError

N = TypeVar("N", int, float)
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
         "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip


def numbers(text: str, kind: Callable[[str], N], option: str) -> list[N]:
    """'1,8,32' as [1, 8, 32], without duplicates."""
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise PruneError(f"{option} {text!r} must be {what} with commas between them") from None


def in_bytes(text: str, option: str) -> int:
    """'4GB' as bytes; 1 GiB is 2^30."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)B?\s*", text.upper())
    try:
        assert match is not None
        return int(float(match[1]) * UNITS[match[2]])
    except (AssertionError, ValueError, KeyError):
        raise PruneError(f"{option} {text!r} must be a size such as 4GB or 512MiB") from None
