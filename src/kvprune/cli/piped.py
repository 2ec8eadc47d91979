"""Text on stdin."""

from __future__ import annotations

import sys


def piped_text() -> str:
    """All of it but its last newline, which `echo` and editors add to what was written."""
    if sys.stdin.isatty():
        print("kvprune: reading from the terminal; Ctrl-D ends the text", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n").removesuffix("\r")
