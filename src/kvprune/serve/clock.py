"""When things happened to a request, for the histograms of /metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvprune.serve.request import Event, Status


class Observer(Protocol):
    """Takes durations in seconds, and sizes, by the name of their histogram."""

    def observe(self, name: str, value: float) -> None: ...


@dataclass
class _Times:
    submitted: float
    admitted: float | None = None
    first: float | None = None
    latest: dict[int, float] = field(default_factory=dict)  # of each choice
    tokens: int = 0


class Clock:
    """Measures from the engine's thread, where nothing waits for a busy event loop."""

    def __init__(self, observer: Observer, now: Callable[[], float] = time.perf_counter):
        self._observer, self._now = observer, now
        self._times: dict[str, _Times] = {}
        self._lock = threading.Lock()

    def submitted(self, id: str) -> None:
        with self._lock:
            self._times[id] = _Times(self._now())

    def see_status(self, status: Status) -> None:
        """After a step: who is no longer waiting was admitted in it."""
        now = self._now()
        with self._lock:
            for row in status.rows:
                times = self._times.get(row.request)
                if times is not None and times.admitted is None and row.state == "running":
                    times.admitted = now

    def see_events(self, id: str, events: list[Event]) -> None:
        now = self._now()
        with self._lock:
            times = self._times.get(id)
        if times is None:
            return
        for event in events:
            if not event.tokens:
                continue
            times.tokens += len(event.tokens)
            if times.first is None:
                times.first = now
                self._observer.observe("time_to_first_token_seconds", now - times.submitted)
            if (before := times.latest.get(event.index)) is not None:
                self._observer.observe("inter_token_latency_seconds", now - before)
            times.latest[event.index] = now

    def finished(self, id: str, complete: bool) -> None:
        """The request is over; its times count if it came to its own end."""
        now = self._now()
        with self._lock:
            times = self._times.pop(id, None)
        if times is None or not complete:
            return
        observe = self._observer.observe
        observe("e2e_request_latency_seconds", now - times.submitted)
        observe("request_generation_tokens", times.tokens)
        # a request may be over before any status has shown it
        admitted = times.admitted if times.admitted is not None else times.submitted
        if times.first is not None:
            admitted = min(admitted, times.first)
            observe("request_prefill_time_seconds", times.first - admitted)
            observe("request_decode_time_seconds", now - times.first)
        observe("request_queue_time_seconds", admitted - times.submitted)
