"""Files of conversations and prefixes: a snapshot of the cache, and what was said in its notes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from kvprune.cache.snapshot import Snapshot
from kvprune.errors import PruneError

# what the notes of each kind of file hold
NOTES: dict[str, dict[str, type]] = {
    "chat": {
        "messages": list, "tokens": list, "text": str, "system": str, "max_new_tokens": int,
        "sampler": dict,
    },
    "prefix": {"tokens": list},
}  # fmt: skip
COMMANDS = {"chat": "kvprune chat --resume", "prefix": "kvprune generate --prefix"}


def load(path: str | Path, kind: Literal["chat", "prefix"]) -> Snapshot:
    """The snapshot in a file of this kind; its notes have all that they should."""
    snapshot = Snapshot.load(path)
    notes = snapshot.notes
    found = notes.get("kind")
    if found != kind:
        remedy = f"use {COMMANDS[found]}" if found in COMMANDS else "give another file"
        what = found if found in COMMANDS else "snapshot"
        raise PruneError(f"{path} holds a {what}, not a {kind}; {remedy}")
    bad = [name for name, of in NOTES[kind].items() if not isinstance(notes.get(name), of)]
    if not bad and not all(isinstance(token, int) for token in notes["tokens"]):
        bad = ["tokens"]
    if not bad and len(notes["tokens"]) < snapshot.tokens:
        bad = ["tokens"]
    if not bad and not all(_is_message(message) for message in notes.get("messages", [])):
        bad = ["messages"]
    if bad:
        raise PruneError(f"{path} is damaged: a {kind} with no valid {bad[0]}; save it again")
    return snapshot


def is_saved(path: str | Path, kind: Literal["chat", "prefix"]) -> bool:
    """Whether a file is of this kind."""
    try:
        load(path, kind)
    except PruneError:
        return False
    return True


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
    )
