"""Who may call, and what nobody gets to see: plain ASGI, which leaves disconnects detectable."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import traceback
from collections.abc import Callable, Sequence
from hmac import compare_digest

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvprune.serve.errors import error_response
from kvprune.serve.request import RequestError

PUBLIC = ("/", "/health")  # the page asks for a key itself; probes have none
LOOPBACK_NAMES = ("localhost", "ip6-localhost", "ip6-loopback")


class Keys:
    """Refuse requests without one of the keys; none given: everybody may call."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        # digests have one length, so that comparing tells nothing of a key's
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._is_public(scope):
            given = Headers(scope=scope).get("authorization")
            if given is None:
                text = "you did not provide an API key; send the header Authorization: Bearer KEY"
                await _refuse(text, "missing_api_key", scope, receive, send)
                return
            if not self._is_known(given):
                text = "the API key is not known to this server"
                await _refuse(text, "invalid_api_key", scope, receive, send)
                return
        await self._app(scope, receive, send)

    @staticmethod
    def _is_public(scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" or scope["path"] in PUBLIC

    def _is_known(self, header: str) -> bool:
        scheme, _, key = header.partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        # all are compared, whichever fits
        fits = [compare_digest(digest, own) for own in self._digests]
        return scheme.lower() == "bearer" and any(fits)


async def _refuse(text: str, code: str, scope: Scope, receive: Receive, send: Send) -> None:
    await error_response(RequestError(text, status=401, code=code))(scope, receive, send)


class LocalNames:
    """Refuse names that merely point here: a web page could lead a browser to a server without
    keys under a name of its own, and read the answers."""

    def __init__(self, app: ASGIApp, names: Sequence[str]):
        self._app, self._names = app, {*LOOPBACK_NAMES, *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_local(Headers(scope=scope).get("host", "")):
            error = RequestError(
                "this server has no API keys and answers to localhost and IP addresses only; "
                "start it with --api-key to reach it by another name",
                status=403,
                code="unknown_host",
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_local(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if not name or name.lower() in self._names:
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


class Outermost:
    """Count answers, and turn what nobody foresaw into an error without a word of the prompt."""

    def __init__(self, app: ASGIApp, answered: Callable[[int], None]):
        self._app, self._answered = app, answered
        self._log = logging.getLogger("kvprune.serve")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._answered(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            log_failure(self._log, error)
            if not started:
                failure = RequestError("internal error; the server's log has it", status=500)
                await error_response(failure)(scope, receive, counted)


def log_failure(log: logging.Logger, error: BaseException) -> None:
    """Where it happened and its kind; an exception's text may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__)[-8:])
    log.error("%s in a request; its message is not logged\n%s", type(error).__name__, frames)
