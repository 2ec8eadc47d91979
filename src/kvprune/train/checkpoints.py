"""Checkpoints that are whole or not there: written aside, flushed, listed, then renamed."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

log = logging.getLogger(__name__)

ASIDE = ".saving"  # beside the checkpoints, so that a rename stays on one file system
LIST = "files.json"  # every file of a checkpoint and its size, written last


def clear(run: Path) -> None:
    """Make the place aside empty; a killed run may have left something there."""
    shutil.rmtree(run / ASIDE, ignore_errors=True)
    (run / ASIDE).mkdir(parents=True)


def publish(written: Path, place: Path) -> None:
    """Give a checkpoint that was written aside its place, in one rename."""
    sizes = _sizes(written)
    for name in sizes:
        _flush(written / name)
    write_atomically(written / LIST, json.dumps(sizes, indent=1).encode())
    _flush(written)
    if place.exists():
        # a directory cannot be replaced in one call; a reader may see neither for a moment
        place.rename(written.with_name(f"{place.name}.old"))
    written.rename(place)
    _flush(place.parent)
    shutil.rmtree(written.parent, ignore_errors=True)


def what_is_wrong(checkpoint: Path) -> str:
    """Why a checkpoint cannot be used; empty if it is whole."""
    try:
        listed = json.loads((checkpoint / LIST).read_text())
    except (OSError, ValueError):
        return f"its {LIST} is missing or damaged"
    found = _sizes(checkpoint)
    for name, size in listed.items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != size:
            return f"{name} has {found[name]:,} bytes instead of {size:,}"
    return ""


def last_whole_checkpoint(run: str | Path) -> Path | None:
    """The newest checkpoint of a run that is whole; broken ones are passed over and named."""
    steps = {}
    for path in Path(run).glob("checkpoint-*"):
        if match := re.fullmatch(r"checkpoint-(\d+)", path.name):
            steps[int(match[1])] = path
    for step in sorted(steps, reverse=True):
        if not (wrong := what_is_wrong(steps[step])):
            return steps[step]
        log.warning("passing over %s: %s", steps[step], wrong)
    return None


def check_whole(checkpoint: str | Path) -> Path:
    """The path itself, or an error that says what is wrong with it."""
    path = Path(checkpoint)
    if wrong := what_is_wrong(path):
        raise PruneError(f"{path} is not a whole checkpoint: {wrong}; resume from an earlier one")
    return path


def _sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): f.stat().st_size for f in files if f.name != LIST}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
