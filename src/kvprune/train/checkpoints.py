"""Atomic checkpoints: written to a staging folder, flushed, listed in a manifest, then renamed."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

log = logging.getLogger(__name__)

STAGING = ".saving"  # in the run's folder, so that the rename stays on one file system
MANIFEST = "files.json"  # every file of a checkpoint and its size, written last
SETTINGS = "kvprune_train.json"  # in every checkpoint: TrainConfig, and the state of γ's control


class CheckpointWriter:
    """Redirects a checkpoint to the staging folder while Trainer writes it, file by file.

    One process, the one with `is_main`, creates and renames folders; `wait` is a barrier of all.
    """

    def __init__(self, is_main: bool, wait: Callable[[], None]):
        self.is_main, self.wait = is_main, wait
        self.staging: Path | None = None  # where Trainer has to write, while it does

    @contextmanager
    def write(self, run: Path, name: str) -> Iterator[Path]:
        """The staged checkpoint, published as run / name at the end, if nothing was raised."""
        staging = run / STAGING
        if self.is_main:
            # a killed run may have left something there
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
        self.wait()
        self.staging = staging
        try:
            yield staging / name
        finally:
            self.staging = None
        self.wait()
        if self.is_main:
            publish(staging / name, run / name)


def publish(staged: Path, target: Path) -> None:
    """Move a staged checkpoint to its final place, in one rename."""
    sizes = _file_sizes(staged)
    for name in sizes:
        _flush(staged / name)
    write_atomically(staged / MANIFEST, json.dumps(sizes, indent=1).encode())
    _flush(staged)
    if target.exists():
        # a directory cannot be replaced in one call; a reader may see neither for a moment
        target.rename(staged.with_name(f"{target.name}.old"))
    staged.rename(target)
    _flush(target.parent)
    shutil.rmtree(staged.parent, ignore_errors=True)


def write_settings(checkpoint: Path, config: dict[str, Any], gamma: dict[str, Any]) -> None:
    settings = {"config": config, "control": gamma}
    write_atomically(checkpoint / SETTINGS, json.dumps(settings, indent=1).encode())


def read_settings(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The TrainConfig of the run that wrote the checkpoint, and the state of γ's control."""
    settings = json.loads((checkpoint / SETTINGS).read_text())
    return settings["config"], settings["control"]


def find_damage(checkpoint: Path) -> str:
    """Why a checkpoint cannot be used; empty if it is complete."""
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError):
        return f"its {MANIFEST} is missing or damaged"
    sizes = _file_sizes(checkpoint)
    for name, size in listed.items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]:,} bytes instead of {size:,}"
    return ""


def last_whole_checkpoint(run: str | Path) -> Path | None:
    """The newest complete checkpoint of a run; damaged ones are skipped with a warning."""
    steps = {}
    for path in Path(run).glob("checkpoint-*"):
        if match := re.fullmatch(r"checkpoint-(\d+)", path.name):
            steps[int(match[1])] = path
    for step in sorted(steps, reverse=True):
        if not (damage := find_damage(steps[step])):
            return steps[step]
        log.warning("skipping %s: %s", steps[step], damage)
    return None


def find_checkpoint(run: Path, requested: str | bool | None) -> Path | None:
    """The checkpoint to resume from: the newest (True), a given one, or none."""
    if requested is True:
        newest = last_whole_checkpoint(run)
        if newest is None:
            raise PruneError(f"there is no complete checkpoint in {run}; start a new run")
        return newest
    return check_complete(requested) if requested else None


def check_complete(checkpoint: str | Path) -> Path:
    path = Path(checkpoint)
    if damage := find_damage(path):
        raise PruneError(
            f"{path} is not a complete checkpoint: {damage}; resume from an earlier one"
        )
    return path


def _file_sizes(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): f.stat().st_size for f in files if f.name != MANIFEST}


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
