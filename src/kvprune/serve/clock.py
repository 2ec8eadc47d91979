"""When things happened to a request, for the histograms of /metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvprune.serve.request import Event, Status


class Observer(Protocol):
    """Takes durations in seconds, and sizes, by the name of their histogram and the model."""

    def observe(self, name: str, value: float, model: str) -> None: ...


Watch = Callable[[Callable[[Status], None]], Callable[[], None]]


@dataclass
class _Times:
    submitted: float
    model: str = ""
    admitted: float = 0.0
    first: float | None = None
    latest: dict[int, float] = field(default_factory=dict)  # of each choice
    tokens: int = 0


class Clock:
    """Measures from the engine's thread, where nothing waits for a busy event loop."""

    def __init__(
        self, observer: Observer, watch: Watch, now: Callable[[], float] = time.perf_counter
    ):
        self._observer, self._watch, self._now = observer, watch, now
        self._times: dict[str, _Times] = {}
        self._queued: set[str] = set()
        self._step = 0.0  # when the step began that is under way, as far as it is known
        self._unwatch: Callable[[], None] | None = None
        self._lock = threading.Lock()

    def submitted(self, id: str, model: str = "") -> None:
        with self._lock:
            self._times[id] = _Times(self._now(), model)
            self._queued.add(id)
            # only while somebody waits: the engine works for those who watch
            if self._unwatch is None:
                self._unwatch = self._watch(self._see_status)

    def _see_status(self, status: Status) -> None:
        """After a step: who runs and waited before was admitted at its start."""
        with self._lock:
            for row in status.rows:
                if row.state == "running":
                    self._admit(row.request)
            self._step = self._now()
            self._stop_watching()

    def _admit(self, id: str) -> None:
        if id in self._queued:
            times = self._times[id]
            times.admitted = max(times.submitted, self._step)
            self._queued.discard(id)

    def _stop_watching(self) -> None:
        if not self._queued and self._unwatch is not None:
            self._unwatch()
            self._unwatch = None

    def see_events(self, id: str, events: list[Event]) -> None:
        now = self._now()
        with self._lock:
            times = self._times.get(id)
            if times is None:
                return
            self._admit(id)
        for event in events:
            if not event.tokens:
                continue
            times.tokens += len(event.tokens)
            if times.first is None:
                times.first = now
                self._observer.observe(
                    "time_to_first_token_seconds", now - times.submitted, times.model
                )
            if (before := times.latest.get(event.index)) is not None:
                self._observer.observe("inter_token_latency_seconds", now - before, times.model)
            times.latest[event.index] = now

    def finished(self, id: str, complete: bool) -> None:
        """The request is over; its times count if it came to its own end."""
        now = self._now()
        with self._lock:
            self._admit(id)
            times = self._times.pop(id, None)
            self._stop_watching()
        if times is None or not complete:
            return
        found = {
            "e2e_request_latency_seconds": now - times.submitted,
            "request_generation_tokens": times.tokens,
            "request_queue_time_seconds": times.admitted - times.submitted,
        }
        if times.first is not None:
            found["request_prefill_time_seconds"] = times.first - times.admitted
            found["request_decode_time_seconds"] = now - times.first
        for name, value in found.items():
            self._observer.observe(name, value, times.model)
