"""The teacher's hidden states on disk: each row is read by the teacher once, whatever the epochs.

Two files, both only appended to: states.bin, in float16, and index.bin, one record per row (digest
of its tokens, where its states begin, how many tokens), written after the states. A kill leaves at
most states without a record, which the next row overwrites.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

RECORD = np.dtype([("digest", "S16"), ("start", "<u8"), ("tokens", "<u8")])
ABOUT = "about.json"


class TeacherStore:
    """States by tokens; `teacher` names the model, `width` is that of a state."""

    def __init__(self, folder: str | Path, teacher: str, width: int):
        self.folder, self.width = Path(folder), width
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"teacher": teacher, "width": width}
        self._check(about)
        self.states, self.index = self.folder / "states.bin", self.folder / "index.bin"
        for file in (self.states, self.index):
            file.touch()
        self.lock = FileLock(self.folder / ".lock")
        self.spans: dict[bytes, tuple[int, int]] = {}
        self.end = 0  # of the states that have a record, in tokens
        with self.lock:
            self._read_index()

    def _check(self, about: dict[str, object]) -> None:
        file = self.folder / ABOUT
        if not file.exists():
            write_atomically(file, json.dumps(about).encode())
        elif (found := json.loads(file.read_text())) != about:
            raise PruneError(
                f"{self.folder} holds states of {found['teacher']} (width {found['width']}), not "
                f"of {about['teacher']} (width {about['width']}); choose another teacher_cache"
            )

    def _read_index(self) -> None:
        """The records that are new since the last look: another run may share the folder."""
        whole = self.index.stat().st_size // RECORD.itemsize
        with self.index.open("r+b") as index:
            index.truncate(whole * RECORD.itemsize)
            index.seek(len(self.spans) * RECORD.itemsize)
            for record in np.fromfile(index, RECORD):
                start, tokens = int(record["start"]), int(record["tokens"])
                # numpy cuts zeros off the end of a bytes field
                self.spans[bytes(record["digest"]).ljust(16, b"\0")] = (start, tokens)
                self.end = max(self.end, start + tokens)

    def get(self, ids: Tensor) -> Tensor | None:
        """States of a row, (T, D) in float32; None if the teacher has not read it."""
        span = self.spans.get(digest(ids))
        if span is None:
            return None
        start, tokens = span
        with self.states.open("rb") as file:
            file.seek(2 * self.width * start)
            numbers = np.fromfile(file, np.float16, tokens * self.width)
        return torch.from_numpy(numbers).view(tokens, self.width).float()

    def put(self, ids: Tensor, states: Tensor) -> None:
        """ids: (T,), states: (T, D)"""
        half = states.detach().to("cpu", torch.float16)
        if not half.isfinite().all():
            raise PruneError(
                f"a state of {float(states.abs().max()):.4g} does not fit into float16; train "
                f"without teacher_cache"
            )
        with self.lock:
            self._read_index()
            if digest(ids) in self.spans:
                return
            with self.states.open("r+b") as file:
                file.seek(2 * self.width * self.end)
                file.write(half.contiguous().numpy().tobytes())
                file.flush()
                os.fsync(file.fileno())
            record = np.array([(digest(ids), self.end, len(ids))], RECORD)
            with self.index.open("ab") as file:
                file.write(record.tobytes())
            self._read_index()


def digest(ids: Tensor) -> bytes:
    return hashlib.blake2b(ids.cpu().to(torch.int64).numpy().tobytes(), digest_size=16).digest()
