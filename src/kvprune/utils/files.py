"""Files and folders that are written completely or not at all, and the user's cache folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def write_atomically(file: Path, data: bytes) -> None:
    """Write to a temporary file, flush to disk, then rename: readers see the old or the new."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        # mkstemp creates a private file; a saved one gets the ordinary mode
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def make_folder_once(
    folder: Path, make: Callable[[Path], None], is_complete: Callable[[Path], bool]
) -> Path:
    """The folder; if it is not complete, `make` fills a temporary one that is then renamed to it.

    One process works while others that want the same folder wait. What a killed process leaves is
    never read, and the next one removes it.
    """
    from filelock import FileLock

    if is_complete(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial")
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if is_complete(folder):
            return folder
        for leftover in (partial, folder):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        try:
            make(partial)
            os.replace(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def cache_folder(given: str | Path | None = None) -> Path:
    """The given folder, or KVPRUNE_CACHE, or ~/.cache/kvprune."""
    return Path(given or os.environ.get("KVPRUNE_CACHE") or "~/.cache/kvprune").expanduser()
