"""Snapshot: one row of a cache as a value, which goes into any cache of the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

FORMAT = "kvprune snapshot 1"

# what reading a damaged file may raise
BROKEN = (
    SafetensorError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError,
    OverflowError,
)  # fmt: skip

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

    def is_like(self, other: Snapshot) -> bool:
        """Whether it has the same layers and columns, of the same dtypes and widths."""
        return len(self.layers) == len(other.layers) and all(
            self._fits(own, theirs) for own, theirs in zip(self.layers, other.layers, strict=True)
        )

    def _fits(self, own: State, theirs: State) -> bool:
        """Of as many tokens as its layer kept, no more than were read."""
        if own.keys() - {"drop_step"} != theirs.keys() - {"drop_step"}:
            return False
        kept = len(own["token"]) if own["token"].dim() else -1
        return 0 <= kept <= self.tokens and all(
            x.shape == (self.tokens,)
            if name == "drop_step"
            else x.dtype is theirs[name].dtype and x.shape == (kept, *theirs[name].shape[1:])
            for name, x in own.items()
        )

    def to_bytes(self) -> bytes:
        """As one safetensors file."""
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
        return safetensors.torch.save(tensors, {"format": FORMAT, "about": json.dumps(about)})

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "this") -> Snapshot:
        """Read what `to_bytes` wrote; `name`: for an error."""
        with _complaining(name):
            # safetensors reads tensors from bytes, but not the words beside them
            size = int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8 : 8 + size]).get("__metadata__", {})
            return cls._made(name, metadata, safetensors.torch.load(data))

    def save(self, path: str | Path) -> Path:
        """Write it as one safetensors file."""
        file = Path(path)
        if not file.parent.is_dir():
            raise PruneError(f"cannot save {file}: there is no folder {file.parent}; make it first")
        write_atomically(file, self.to_bytes())
        return file

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """Read what `save` wrote."""
        file = Path(path)
        if not file.is_file():
            raise PruneError(f"there is no snapshot {file}; Snapshot.save writes one")
        with _complaining(file), safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            return cls._made(file, opened.metadata() or {}, tensors)

    @classmethod
    def _made(
        cls, name: str | Path, metadata: Mapping[str, str], tensors: Mapping[str, Tensor]
    ) -> Snapshot:
        if metadata.get("format") != FORMAT:
            raise PruneError(
                f"{name} is not of the format {FORMAT!r} but {metadata.get('format')!r}; write it "
                f"again with this version"
            )
        about = json.loads(metadata["about"])
        states: dict[str, list[dict[str, Tensor]]] = {
            kind: [{} for _ in range(about[kind])] for kind in ("layers", "others")
        }
        for key, tensor in tensors.items():
            kind, index, column = key.split(".")
            states[kind][int(index)][column] = tensor
        return cls(
            about["tokens"], tuple(states["layers"]), tuple(states["others"]),
            about["fingerprint"], about["notes"],
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"Snapshot({self.tokens} tokens, {self.nbytes} bytes)"


@contextmanager
def _complaining(name: str | Path) -> Iterator[None]:
    """Whatever is wrong with a file, one error says so."""
    try:
        yield
    except PruneError:
        raise
    except BROKEN as error:
        raise PruneError(f"{name} is not a snapshot or is damaged: {error}") from error


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else text[:17] + "..."
