"""Snapshot: one row of a cache as a value, which goes into any cache of the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

FORMAT = "kvprune snapshot 1"

# what a layer holds of a row, by name
State = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What every layer still holds of one row's tokens, in the form in which it is stored.

    `fingerprint` says of which model, adapter, settings and form of storage it is: other caches
    refuse it. `notes` are the caller's own (a conversation, say), plain values that JSON can hold.
    """

    tokens: int  # how many the row had read
    layers: tuple[State, ...]  # of the pruned layers
    others: tuple[State, ...]  # of the layers that are not pruned
    fingerprint: Mapping[str, Any]
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for state in (*self.layers, *self.others) for x in state.values())

    def check(self, fingerprint: Mapping[str, Any]) -> None:
        """Raise unless it is of a cache with this fingerprint."""
        keys = fingerprint.keys() | self.fingerprint.keys()
        differ = [key for key in sorted(keys) if fingerprint.get(key) != self.fingerprint.get(key)]
        if differ:
            details = ", ".join(
                f"{key} ({_short(self.fingerprint.get(key))}, here {_short(fingerprint.get(key))})"
                for key in differ
            )
            raise PruneError(
                f"the snapshot is of another cache, it differs in {details}; read its text again, "
                f"or load what it was made with"
            )

    def save(self, path: str | Path) -> Path:
        """Write it as one safetensors file."""
        file = Path(path)
        tensors = {
            f"{kind}.{index}.{name}": tensor.contiguous()
            for kind in ("layers", "others")
            for index, state in enumerate(getattr(self, kind))
            for name, tensor in state.items()
        }
        about = {
            "tokens": self.tokens,
            "layers": len(self.layers),
            "others": len(self.others),
            "fingerprint": dict(self.fingerprint),
            "notes": dict(self.notes),
        }
        metadata = {"format": FORMAT, "about": json.dumps(about)}
        if not file.parent.is_dir():
            raise PruneError(f"cannot save {file}: there is no folder {file.parent}; make it first")
        write_atomically(file, safetensors.torch.save(tensors, metadata))
        return file

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """Read what `save` wrote."""
        file = Path(path)
        if not file.is_file():
            raise PruneError(f"there is no snapshot {file}; Snapshot.save writes one")
        try:
            with safe_open(file, framework="pt") as opened:
                metadata = opened.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise PruneError(
                        f"{file} is not of the format {FORMAT!r} but {metadata.get('format')!r}; "
                        f"write it again with this version"
                    )
                about = json.loads(metadata["about"])
                states: dict[str, list[dict[str, Tensor]]] = {
                    kind: [{} for _ in range(about[kind])] for kind in ("layers", "others")
                }
                for key in opened.keys():  # noqa: SIM118, not a dict
                    kind, index, name = key.split(".")
                    states[kind][int(index)][name] = opened.get_tensor(key)
            return cls(
                about["tokens"], tuple(states["layers"]), tuple(states["others"]),
                about["fingerprint"], about["notes"],
            )  # fmt: skip
        except PruneError:
            raise
        except (SafetensorError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise PruneError(f"{file} is not a snapshot or is damaged: {error}") from error

    def __repr__(self) -> str:
        return f"Snapshot({self.tokens} tokens, {self.nbytes} bytes)"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:17] + "..."
