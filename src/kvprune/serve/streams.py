"""Between the engine's thread and a client: events in order, bounded, and cancelled in time."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Message, Receive, Scope, Send

from kvprune.errors import PruneError
from kvprune.serve.clock import Clock
from kvprune.serve.limits import Limits
from kvprune.serve.request import Event, Request, RequestError
from kvprune.serve.seam import ServingEngine

T = TypeVar("T")
Numbered = tuple[int, Event]  # the number of the choice: prompt · n + index
CHECK_SECONDS = 0.5  # how often the engine's health is looked at while nothing comes


class Answer:
    """The events of the requests that one HTTP request became."""

    def __init__(
        self,
        engine: ServingEngine,
        requests: Sequence[Request],
        clock: Clock,
        limits: Limits,
        live: bool = True,
    ):
        """`live`: each event is wanted at once, not all of them at the end."""
        self._engine, self._requests, self._clock, self._limits = engine, requests, clock, limits
        self._live = live
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._events: deque[Numbered] = deque()
        self._submitted: dict[str, int] = {}  # by id: choices that have not ended
        self._left = sum(request.n for request in requests)
        self._open = True
        self._failure: RequestError | None = None

    def submit(self) -> None:
        """Hand every request to the engine, or none of them."""
        for number, request in enumerate(self._requests):
            self._submitted[request.id] = request.n
            self._clock.submitted(request.id, request.model)
            try:
                self._engine.submit(request, self._sink(number, request))
            except Exception as error:
                self._submitted[request.id] = 0
                self.cancel()
                if isinstance(error, PruneError):
                    raise RequestError(str(error), param="kvprune") from error
                raise

    def _sink(self, number: int, request: Request) -> Any:
        def sink(events: list[Event]) -> None:
            """Called from the engine's thread."""
            if not self._open:
                return
            self._clock.see_events(request.id, events)
            self._events.extend((number * request.n + event.index, event) for event in events)
            ended = sum(event.finish is not None for event in events)
            if ended:
                self._left -= ended
                self._submitted[request.id] -= ended
                if not self._submitted[request.id]:
                    complete = events[-1].finish in ("stop", "length")
                    self._clock.finished(request.id, complete)
            if self._live and len(self._events) > self._limits.unsent:
                self._failure = RequestError(
                    "the client reads too slowly", status=408, code="slow_client"
                )
                self.cancel()  # at once: whoever sends may be blocked for long
            if self._live or self._left <= 0 or ended:
                self._wake()

        return sink

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.set)
        except RuntimeError:
            # the server's loop has ended: nobody reads this any more
            self.cancel()

    def fail(self, error: RequestError) -> None:
        """End it with an error, from the thread of the event loop."""
        self._failure = error
        self._arrived.set()

    def cancel(self) -> None:
        """Tell the engine that nobody waits for what has not ended; safe to call twice."""
        if not self._open:
            return
        self._open = False
        for id, left in self._submitted.items():
            self._clock.finished(id, False)
            if left:
                self._engine.cancel(id)

    async def events(self) -> AsyncIterator[list[Numbered]]:
        """What has arrived, as it arrives; an empty list when a sign of life is due.

        Raises what the engine reports, or what keeps it from going on.
        """
        deadline = time.monotonic() + self._limits.seconds
        silent_since = time.monotonic()
        try:
            while True:
                await self._news(min(CHECK_SECONDS, self._limits.ping_seconds))
                # the count before the events: what ended is then among them
                left = self._left
                batch = [self._events.popleft() for _ in range(len(self._events))]
                for _, event in batch:
                    _raise_from(event)
                if batch:
                    yield batch
                    silent_since = time.monotonic()
                if left <= 0:
                    return
                self._check(deadline)
                if time.monotonic() - silent_since >= self._limits.ping_seconds:
                    yield []
                    silent_since = time.monotonic()
        finally:
            self.cancel()

    async def _news(self, seconds: float) -> None:
        """Wait for events, but not for longer than so many seconds.

        asyncio.wait_for would make a task for each token of each client.
        """
        timer = self._loop.call_later(seconds, self._arrived.set)
        try:
            await self._arrived.wait()
        finally:
            timer.cancel()
        self._arrived.clear()

    def _check(self, deadline: float) -> None:
        if self._failure is not None:
            raise self._failure
        if time.monotonic() > deadline:
            raise RequestError(
                f"the answer took more than {self._limits.seconds:g} seconds; ask for fewer tokens",
                status=408,
                code="timeout",
            )
        if not self._events and not self._engine.alive:
            raise dead(self._engine)


def dead(engine: ServingEngine) -> RequestError:
    reason = f": {engine.failure}" if engine.failure else ""
    return RequestError(f"the engine has stopped{reason}", status=503, code="engine_dead")


def _raise_from(event: Event) -> None:
    if event.finish == "error":
        raise event.error or RequestError("the engine failed", status=500)
    if event.finish == "cancelled":
        raise RequestError("the server is stopping", status=503, code="stopping")


class ClientGone(Exception):
    """There is nobody left to answer."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled at once if the client goes away."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


class EventStream(Response):
    """Server-sent events until the client leaves, or takes nothing for too long."""

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        send_seconds: float,
        close: Callable[[], None],
        headers: Mapping[str, str] | None = None,
    ):
        """`close` is called at the end, also if not even the first part was wanted."""
        own = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers={**own, **(headers or {})})
        del self.headers["content-length"]
        self._parts, self._send_seconds, self._close = parts, send_seconds, close
        self._sending: float | None = None  # since when

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # if the client is gone the response stays incomplete, upon which the server closes the
        # connection
        try:
            with suppress(ClientGone, OSError):
                await unless_gone(receive, self._watch(send))
        finally:
            self._close()

    async def _watch(self, send: Send) -> None:
        """Stream, and end when one part was not taken in time."""
        streaming = asyncio.ensure_future(self._stream(send))
        try:
            while not streaming.done():
                await asyncio.wait({streaming}, timeout=self._send_seconds / 4)
                since = self._sending
                if since is not None and time.monotonic() - since > self._send_seconds:
                    raise ClientGone
            streaming.result()
        finally:
            streaming.cancel()
            await asyncio.gather(streaming, return_exceptions=True)

    async def _stream(self, send: Send) -> None:
        async def take(message: Message) -> None:
            self._sending = time.monotonic()
            await send(message)
            self._sending = None

        try:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await take(start)
            async for part in self._parts:
                await take({"type": "http.response.body", "body": part, "more_body": True})
            await take({"type": "http.response.body", "body": b""})
        finally:
            await self._parts.aclose()
