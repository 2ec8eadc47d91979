"""Between the engine and a folder of snapshots: the engine's thread never waits for the folder.

A request waits for what the folder holds of its prompt, but not for long. What the engine keeps is
written behind its back, as fast as the folder takes it; the rest of a rush is not written.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from kvprune.cache.snapshot import Snapshot
    from kvprune.serve.snapshot_folder import Origin, SnapshotFolder

log = logging.getLogger("kvprune.serve")
COUNTED = ("queries", "hits", "writes", "failures", "left_out")
READERS = 2
PATIENCE = 2.0  # seconds that a request waits for the folder
WAITING_BYTES = 2**28  # of snapshots that are not written yet
QUIET = 60.0  # seconds between two warnings

T = TypeVar("T")
Found = Callable[["Snapshot | None"], None]
Job = Callable[[], None]


class Shelf:
    """Reads and writes for one engine, in threads of its own, from the first job to `close`."""

    def __init__(self, folder: SnapshotFolder, patience: float = PATIENCE):
        self.folder, self.patience = folder, patience
        self.counts = dict.fromkeys(COUNTED, 0)
        self._reads: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._unwritten = 0  # bytes
        self._late = 0  # reads for which nobody waits any more
        self._warned = -QUIET
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def look(self, tokens: Sequence[int], origin: Origin, longer_than: int, found: Found) -> bool:
        """Call `found` once: with the longest snapshot of these tokens, or None, or too late.

        It comes from another thread, within `patience` or never. False, and it is not called, while
        readers hang: a folder that does not answer delays few requests.
        """
        with self._lock:
            if self._late >= READERS:
                return False
        self._start()
        once = _Once(found)
        timer = threading.Timer(self.patience, lambda: self._give_up(once))
        timer.daemon = True

        def read() -> None:
            self._count("queries")
            snapshot = self._guarded(lambda: self.folder.find(tokens, origin, longer_than))
            timer.cancel()
            if once(snapshot):
                self._count("hits", int(snapshot is not None))
            else:
                with self._lock:
                    self._late -= 1

        timer.start()
        self._reads.put(read)
        return True

    def write(self, tokens: Sequence[int], origin: Origin, snapshot: Snapshot) -> None:
        """Write a snapshot some time soon; not if too much waits already."""
        size = snapshot.nbytes
        with self._lock:
            if self._unwritten + size > WAITING_BYTES:
                self.counts["left_out"] += 1
                return
            self._unwritten += size
        self._start()

        def write() -> None:
            written = self._guarded(lambda: self.folder.put(tokens, origin, snapshot))
            with self._lock:
                self._unwritten -= size
                self.counts["writes"] += int(bool(written))

        self._writes.put(write)

    def counted(self) -> dict[str, int]:
        with self._lock:
            return {f"stored_{name}": number for name, number in self.counts.items()}

    def close(self, seconds: float = 10.0) -> None:
        """Write what waits, for so long at most, and end the threads."""
        with self._lock:
            threads, self._threads = self._threads, []
        for thread in threads:
            (self._writes if thread.name.endswith("writer") else self._reads).put(None)
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))

    def _start(self) -> None:
        with self._lock:
            if self._threads:
                return
            works = [("writer", self._writes), *[("reader", self._reads)] * READERS]
            self._threads = [
                threading.Thread(
                    target=_work, args=[jobs], name=f"kvprune-snapshot-{name}", daemon=True
                )
                for name, jobs in works
            ]
            for thread in self._threads:
                thread.start()

    def _give_up(self, once: _Once) -> None:
        with self._lock:
            # before it is decided who was first, or the reader might count down first
            self._late += 1
        if once(None):
            self._warn(f"{self.folder.url} does not answer; prompts are read without it")
        else:
            with self._lock:
                self._late -= 1

    def _guarded(self, job: Callable[[], T]) -> T | None:
        """A store that fails is a store that has nothing."""
        try:
            return job()
        except Exception as error:  # the libraries of fsspec raise many types
            self._count("failures")
            self._warn(f"cannot use {self.folder.url}: {type(error).__name__}: {error}")
            return None

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number

    def _warn(self, text: str) -> None:
        now = time.monotonic()
        if now - self._warned >= QUIET:
            self._warned = now
            log.warning(text)


class _Once:
    """Calls back the first time only."""

    def __init__(self, found: Found):
        self._found: Found | None = found
        self._lock = threading.Lock()

    def __call__(self, snapshot: Snapshot | None) -> bool:
        """False if it is too late."""
        with self._lock:
            found, self._found = self._found, None
        if found is None:
            return False
        found(snapshot)
        return True


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
