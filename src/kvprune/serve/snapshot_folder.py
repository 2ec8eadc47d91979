"""Snapshots in a folder or an object store, which outlive the process that wrote them.

What fsspec can write to will do: file:///path, memory://, s3://bucket/prefix. A snapshot is found
again by the exact tokens that were read, the fingerprint of what read them, and the salt of the
request. It is one file, written whole or not at all:

    FIRST/LENGTH-ALL    FIRST: of fingerprint, salt and the first tokens; ALL: of all tokens

so that one listing shows every snapshot that a prompt might go on from.
"""

from __future__ import annotations

import array
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvprune.cache.snapshot import Snapshot
from kvprune.errors import PruneError
from kvprune.serve.prefixes import SHORTEST
from kvprune.serve.seal import VARIABLE, Damaged, Seal
from kvprune.utils.files import write_atomically
from kvprune.utils.parse import in_bytes

log = logging.getLogger("kvprune.serve")
LOCAL = ("file", "local")
# what this module has written, whole or broken off: a folder may hold other files, which stay
WORK = 3600.0  # seconds after which a file that is not complete was left by a killed process
OWN = re.compile(r"/[0-9a-f]{32}/(\d+-[0-9a-f]{64}|\.\d+-[0-9a-f]{64}\.\w+)$")


class Origin(NamedTuple):
    """What a snapshot must be of, beside its tokens, for a request to go on from it."""

    fingerprint: Mapping[str, Any]
    salt: str = ""
    recorded: bool = False

    def text(self) -> str:
        return json.dumps(
            [dict(self.fingerprint), self.salt, self.recorded], sort_keys=True, default=str
        )


class SnapshotFolder:
    """A folder of snapshots with a limit of bytes: beyond it the least recently used go.

    Processes may share it. All methods may be called from any thread, and wait for the store.
    """

    def __init__(self, url: str, limit: int, secret: str | None = None):
        self.url, self.limit, self.seal = url, limit, Seal(secret)
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise PruneError(
                "--snapshots needs fsspec: pip install 'kvprune[snapshots]'"
            ) from error
        try:
            self._fs, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise PruneError(
                f"--snapshots {url} cannot be used: {error}; give a folder, or a URL of a store "
                f"that fsspec knows, such as s3://bucket/prefix with the package s3fs"
            ) from error
        self._root = root.rstrip("/")
        protocol = self._fs.protocol
        names = (protocol,) if isinstance(protocol, str) else protocol
        self._local = any(name in LOCAL for name in names)
        self._used: dict[str, float] = {}  # when this process last read a file
        self._damaged: set[str] = set()  # that may be written again

    def put(self, tokens: Sequence[int], origin: Origin, snapshot: Snapshot) -> bool:
        """Write a snapshot of these tokens, unless it is there or larger than the limit."""
        name = self._name(tokens, origin)
        if name not in self._damaged and self._fs.exists(self._path(name)):
            self._touch(name)
            return False
        noted = Snapshot(
            snapshot.tokens, snapshot.layers, snapshot.others, snapshot.fingerprint,
            {"tokens": list(tokens), "origin": self._of(origin)},
        )  # fmt: skip
        sealed = self.seal.close(name, noted.to_bytes())
        if len(sealed) > self.limit:
            return False
        self._write(self._path(name), sealed)
        self._damaged.discard(name)
        self._used[name] = time.time()
        self._shrink()
        return True

    def find(self, tokens: Sequence[int], origin: Origin, longer_than: int = 0) -> Snapshot | None:
        """The longest one that the tokens begin with, and go on from by one at least.

        What cannot be read, whatever the reason, is not there: the log says why.
        """
        if len(tokens) <= max(SHORTEST, longer_than):
            return None
        group = self._group(tokens, origin)
        for length in self._lengths(group):
            if longer_than < length < len(tokens):
                snapshot = self._read(tokens[:length], origin)
                if snapshot is not None:
                    return snapshot
        return None

    def _lengths(self, group: str) -> list[int]:
        """Of the snapshots in a group, the longest first."""
        path = self._path(group)
        self._fs.invalidate_cache(path)  # other processes write too
        try:
            found = self._fs.ls(path, detail=False)
        except FileNotFoundError:
            return []
        names = (Path(file).name.partition("-")[0] for file in found)
        return sorted({int(name) for name in names if name.isdecimal()}, reverse=True)

    def _read(self, tokens: Sequence[int], origin: Origin) -> Snapshot | None:
        name = self._name(tokens, origin)
        try:
            sealed = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None  # one of the same length, but of other tokens
        try:
            snapshot = Snapshot.from_bytes(self.seal.open(name, sealed), name)
            self._check(snapshot, tokens, origin)
        except (Damaged, PruneError) as error:
            log.warning("the snapshot %s in %s is not used: %s", name, self.url, error)
            self._damaged.add(name)
            return None
        self._used[name] = time.time()
        self._touch(name)
        return snapshot

    def _check(self, snapshot: Snapshot, tokens: Sequence[int], origin: Origin) -> None:
        own = snapshot.notes.get("tokens"), snapshot.notes.get("origin"), snapshot.tokens
        if own != (list(tokens), self._of(origin), len(tokens)):
            raise Damaged("it is of other tokens or another model")
        snapshot.check(origin.fingerprint)

    def _write(self, path: str, data: bytes) -> None:
        parent = path.rpartition("/")[0]
        if self._local:
            for folder in (self._root, parent):
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(Path(path), data)
            return
        # one object, which a store shows when all of it has arrived
        self._fs.makedirs(parent, exist_ok=True)
        self._fs.pipe_file(path, data)

    def _shrink(self) -> None:
        """Remove what was used least recently until the limit holds; no file but our own."""
        found = {path: about for path, about in self._files() if OWN.search(path)}
        total = sum(size for size, _ in found.values())
        for path in sorted(found, key=lambda path: self._last_used(path, found[path][1])):
            if total <= self.limit:
                return
            total -= found[path][0]
            self._used.pop(self._short(path), None)
            with suppress(FileNotFoundError):  # another process was faster
                self._fs.rm_file(path)

    def _files(self) -> Iterator[tuple[str, tuple[int, float]]]:
        """Every file with its bytes, and when it was written or, on a disk, last used."""
        if self._local:
            # not by fsspec, which leaves out a folder in which a file has just been renamed
            for entry in Path(self._root).glob("*/*"):
                with suppress(FileNotFoundError):
                    about = entry.stat()
                    in_work = entry.name.startswith(".") and time.time() - about.st_mtime < WORK
                    if not in_work:
                        yield str(entry), (about.st_size, about.st_mtime)
            return
        self._fs.invalidate_cache(self._root)
        for path, about in self._fs.find(self._root, detail=True).items():
            times = (about[key] for key in ("LastModified", "created", "mtime") if key in about)
            written: Any = next(times, 0.0)
            seconds = written.timestamp() if hasattr(written, "timestamp") else float(written)
            yield path, (int(about["size"] or 0), seconds)

    def _last_used(self, path: str, written: float) -> float:
        return max(written, self._used.get(self._short(path), 0.0))

    def _touch(self, name: str) -> None:
        """Tell other processes that it was used, where files have times that can be set."""
        if self._local:
            # not by fsspec, which would make a file that has just been removed
            with suppress(FileNotFoundError):
                os.utime(self._path(name))

    def _of(self, origin: Origin) -> str:
        """An origin without its salt, which is the client's secret."""
        return self.seal.name(origin.text().encode())

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _short(self, path: str) -> str:
        return "/".join(path.split("/")[-2:])

    def _group(self, tokens: Sequence[int], origin: Origin) -> str:
        return self.seal.name(origin.text().encode() + _bytes(tokens[:SHORTEST]))[:32]

    def _name(self, tokens: Sequence[int], origin: Origin) -> str:
        own = self.seal.name(origin.text().encode() + _bytes(tokens))
        return f"{self._group(tokens, origin)}/{len(tokens)}-{own}"


def _bytes(tokens: Sequence[int]) -> bytes:
    return array.array("q", tokens).tobytes()


def open_folder(url: str, limit: str) -> SnapshotFolder:
    """As the server's options name it; the secret is in the environment, if there is one."""
    return SnapshotFolder(url, in_bytes(limit, "--snapshot-limit"), os.environ.get(VARIABLE))
