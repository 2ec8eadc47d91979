"""A server of the application: its log, and how it stops."""

from __future__ import annotations

import copy
import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvprune.serve.service import Service

BACKLOG = 2048
GRACE_SECONDS = 5  # for answers that were ended to reach their clients


class Server(uvicorn.Server):
    """uvicorn, but the first signal lets running requests finish while new ones are refused.

    uvicorn would close its socket at once: clients would see a refused connection, not a 503.
    """

    def __init__(
        self,
        app: FastAPI,
        drain: float = 30.0,
        log_level: str = "info",
        on_ready: Callable[[], None] = lambda: None,
    ):
        """`on_ready` is called once connections are accepted."""
        super().__init__(
            uvicorn.Config(
                app,
                log_config=log_config(log_level),
                log_level=None,
                lifespan="on",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
                backlog=BACKLOG,
            )
        )
        self._service: Service = app.state.service
        self._drain, self._on_ready = drain, on_ready
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            self.force_exit = self.should_exit = True
        self.drain()

    def drain(self) -> None:
        """Refuse new requests; stop when the running ones are over, or after their time."""
        self._service.draining = True
        if self._deadline is None:
            self._deadline = time.monotonic() + self._drain

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None and not self.should_exit:
            idle = not self._service.answers
            self.should_exit = idle or time.monotonic() > self._deadline
        if self.should_exit:
            self._service.close()
        return await super().on_tick(counter)


class WithoutQuery(logging.Filter):
    """Takes the query from the paths of the access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple) and len(record.args) == 5:
            client, method, path, *rest = record.args
            record.args = (client, method, str(path).partition("?")[0], *rest)
        return True


def log_config(level: str) -> dict[str, Any]:
    """uvicorn's, on stderr, without queries; its talk about itself only where it warns."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["filters"] = {"without_query": {"()": WithoutQuery}}
    config["handlers"]["access"] |= {"stream": "ext://sys.stderr", "filters": ["without_query"]}
    quieter = "WARNING" if level.upper() == "INFO" else level.upper()
    config["loggers"]["uvicorn.access"]["level"] = level.upper()
    config["loggers"]["uvicorn.error"] = {"level": quieter}
    config["loggers"]["kvprune.serve"] = {
        "handlers": ["default"], "level": level.upper(), "propagate": False,
    }  # fmt: skip
    return config
