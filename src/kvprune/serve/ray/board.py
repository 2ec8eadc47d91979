"""Where the replicas leave word of themselves, so that each can tell of all."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvprune.serve.fleet import Report

FORGET_SECONDS = 60.0  # after which a replica that is silent is not spoken of any more


class Board:
    """The latest report of every replica, in a small deployment of its own."""

    def __init__(self, now: Callable[[], float] = time.monotonic):
        self._now = now
        self._found: dict[str, tuple[float, Report]] = {}

    async def put(self, report: Report) -> None:
        self._found[report.replica] = (self._now(), report)

    async def leave(self, replica: str) -> None:
        self._found.pop(replica, None)

    async def reports(self, metrics: bool = False) -> list[Report]:
        """By name; metrics are most of their bytes, so they come only if they are wanted."""
        now = self._now()
        self._found = {
            name: (then, report)
            for name, (then, report) in sorted(self._found.items())
            if now - then < FORGET_SECONDS
        }
        return [
            replace(report, age=now - then, metrics=report.metrics if metrics else ())
            for then, report in self._found.values()
        ]
