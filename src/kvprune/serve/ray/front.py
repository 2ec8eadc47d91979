"""What stands before all replicas, in Ray's proxies: which conversation it is, and errors in
OpenAI's shape.

Ray Serve takes it from the environment of the node:
RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=kvprune.serve.ray.front:middlewares
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from hashlib import blake2b
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvprune.serve.errors import error_body, error_response
from kvprune.serve.request import RequestError

SESSION_HEADER = os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id")
READ = ("/v1/chat/completions", "/v1/completions", "/v1/prefixes")
# ids of answers name the replica that wrote them, and has their trace
TRACE = re.compile(r"/v1/traces/(?:chatcmpl|cmpl)-(\w+)-[0-9a-f]{32}")
EXACT = "replica:"  # as in router.py, which Ray sends elsewhere by its text
MOST_BYTES = 2**20  # of a body that is read here; larger ones go where there is room
MOST_CHARACTERS, MOST_TOKENS = 64, 16  # that tell one text from another
READ_SECONDS = 10.0  # for a body to arrive; a slower one is the replica's to wait for
IN_A_THREAD = 2**16  # bytes of JSON whose reading would hold up other requests


def middlewares() -> list[Middleware]:
    return [Middleware(Front)]


class Front:
    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # /-/ is Ray's own
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        if SESSION_HEADER not in Headers(scope=scope):
            session, receive = await _session(scope, receive)
            if session is not None:
                MutableHeaders(scope=scope)[SESSION_HEADER] = session
        shaped = Shaped(scope, receive, send)
        await self._app(scope, receive, shaped.send)
        await shaped.end()


async def _session(scope: Scope, receive: Receive) -> tuple[str | None, Receive]:
    """Whose request it is, and its messages, to be received once more."""
    if found := TRACE.fullmatch(scope["path"]):
        return EXACT + found[1], receive
    if scope["method"] != "POST" or scope["path"] not in READ:
        return None, receive
    coming: list[asyncio.Future[Message]] = []
    body, more = b"", True
    end = time.monotonic() + READ_SECONDS
    while more and len(body) <= MOST_BYTES:
        coming.append(asyncio.ensure_future(receive()))
        # what does not come in time is not cancelled: the replica waits for the same message
        await asyncio.wait(coming[-1:], timeout=max(0.0, end - time.monotonic()))
        if not coming[-1].done():
            break
        message = coming[-1].result()
        body += message.get("body", b"")
        more = message["type"] == "http.request" and message.get("more_body", False)

    async def again() -> Message:
        return await (coming.pop(0) if coming else receive())

    if more or not body:
        return None, again
    if len(body) > IN_A_THREAD:
        return await asyncio.to_thread(conversation, body), again
    return conversation(body), again


def conversation(body: bytes) -> str | None:
    """A name that all turns of a conversation share: a hash of how it begins.

    The first message of the user is part of it, or all that share a system message would meet in
    one replica. None for what no replica will accept.
    """
    try:
        asked = json.loads(body)
        start = _start(asked)
        salt = asked.get("cache_salt")
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError, IndexError):
        return None
    if start is None:
        return None
    text = json.dumps([asked.get("model"), salt, start])
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _start(asked: Any) -> Any:
    if isinstance(messages := asked.get("messages"), list):
        users = (i for i, message in enumerate(messages) if message["role"] == "user")
        return messages[: next(users, len(messages)) + 1] or None
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, list):
        return prompt[:MOST_TOKENS] or None
    return prompt[:MOST_CHARACTERS] or None if isinstance(prompt, str) else None


class Shaped:
    """An answer on its way out: what Ray says of its own becomes OpenAI's error."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self._scope, self._receive, self._send = scope, receive, send
        self._started = self._complete = self._stream = False
        self._error: RequestError | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._error = _of_ray(message)
            if self._error is None:
                self._started = True
                kind = Headers(raw=message["headers"]).get("content-type", "")
                self._stream = kind.startswith("text/event-stream")
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self._complete = True
        if self._error is None:
            await self._send(message)

    async def end(self) -> None:
        """Nothing more comes: tell why, where no answer or half of one was sent."""
        if self._error is not None:
            await error_response(self._error)(self._scope, self._receive, self._send)
        elif not self._started:
            await error_response(LOST)(self._scope, self._receive, self._send)
        elif self._stream and not self._complete:
            event = f"data: {json.dumps(error_body(LOST))}\n\n".encode()
            await self._send({"type": "http.response.body", "body": event})


LOST = RequestError(
    "the replica that had this request has stopped; send it again", status=503, code="replica_lost"
)


def _of_ray(start: Message) -> RequestError | None:
    """The error that a plain text of Ray's means; None for an answer of a replica.

    The application answers to every path and with JSON, so that 404 means that there is none yet.
    """
    headers = Headers(raw=start["headers"])
    if start["status"] < 400 or not headers.get("content-type", "").startswith("text/plain"):
        return None
    if start["status"] == 429:
        return RequestError("too many requests wait; try again later", status=429)
    if start["status"] == 408:
        return RequestError("the answer took too long", status=408, code="timeout")
    return RequestError(
        "no replica can answer now: they start or stop", status=503, code="no_replica"
    )
