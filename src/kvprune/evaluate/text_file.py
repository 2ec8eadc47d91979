"""Plain text files, compressed or not."""

from __future__ import annotations

import gzip
from pathlib import Path

from kvprune.errors import PruneError


def read_text(file: Path) -> str:
    """The text of a .txt or .txt.gz file."""
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise PruneError(f"cannot read text from {file}: {error}") from error
