"""Reading a request's body: bounded in bytes, time and depth, and JSON or refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from kvprune.serve.errors import BodyError
from kvprune.serve.limits import Limits
from kvprune.serve.request import RequestError


class BoundedRequest(Request):
    """A request whose body is refused before it is held, if it is too large."""

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            limits: Limits = self.app.state.limits
            self._check_type()
            try:
                self._body = await asyncio.wait_for(self._bounded(limits), limits.body_seconds)
            except (asyncio.TimeoutError, TimeoutError):
                _refuse(f"the body took more than {limits.body_seconds:g} seconds", 408, "timeout")
            except ClientDisconnect:
                _refuse("the client left", 499)
        return self._body

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            self._json = self._parsed(await self.body(), self.app.state.limits.depth)
        return self._json

    def _check_type(self) -> None:
        kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            _refuse(
                f"the body must be JSON, not {kind or 'of an unknown type'}; "
                f"send the header Content-Type: application/json",
                415,
                "unsupported_content_type",
            )

    async def _bounded(self, limits: Limits) -> bytes:
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limits.body_bytes:
            _too_large(limits)
        parts, size = [], 0
        async for part in self.stream():  # chunked bodies announce no length, and lengths can lie
            size += len(part)
            if size > limits.body_bytes:
                _too_large(limits)
            parts.append(part)
        return b"".join(parts)

    def _parsed(self, body: bytes, depth: int) -> Any:
        try:
            value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
        except RecursionError:
            _refuse(f"the JSON of the body is nested deeper than {depth}")
        except ValueError as error:
            # the error's own text may quote the body; a position does not
            where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            _refuse(f"the body is not valid JSON{where}")
        if is_deeper(value, depth):
            _refuse(f"the JSON of the body is nested deeper than {depth}")
        return value


class JsonRoute(APIRoute):
    """A route whose requests are bounded."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(BoundedRequest(request.scope, request.receive))

        return bounded


def is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than so many times."""
    level = [value]
    for _ in range(depth):
        level = [
            part
            for whole in level
            if isinstance(whole, dict | list)
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, dict | list)
        ]
        if not level:
            return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _too_large(limits: Limits) -> NoReturn:
    _refuse(f"the body is larger than {limits.body_bytes:,} bytes", 413, "body_too_large")


def _refuse(message: str, status: int = 400, code: str | None = None) -> NoReturn:
    raise BodyError(RequestError(message, status=status, code=code))
