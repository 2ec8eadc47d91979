"""Errors as OpenAI words them: one shape for everything that can go wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvprune.serve.request import RequestError

# clients retry 408, 409, 429 and 5xx unless they are told otherwise
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"x-should-retry": "false"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}
CODES = {404: "not_found", 405: "method_not_allowed", 429: "rate_limit_exceeded"}


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's JSON of an error."""
    if error.status >= 500:
        kind = "server_error"
    else:
        kind = "rate_limit_error" if error.status == 429 else "invalid_request_error"
    code = error.code or CODES.get(error.status)
    return {
        "error": {"message": error.message, "type": kind, "param": error.param, "code": code},
    }


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    own = HEADERS.get(error.status, {})
    return JSONResponse(error_body(error), error.status, headers={**own, **(headers or {})})


class BodyError(HTTPException):
    """A RequestError while the body is read: FastAPI replaces all but its own exceptions there."""

    def __init__(self, error: RequestError):
        super().__init__(error.status, error.message)
        self.error = error


def add_handlers(app: FastAPI) -> None:
    """Give every error of the application, its own and FastAPI's, OpenAI's shape."""

    async def refused(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return error_response(in_words(error.errors()))

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if isinstance(error, BodyError):
            return error_response(error.error)
        return error_response(_routing(request, error), error.headers)

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _routing(request: Request, error: HTTPException) -> RequestError:
    status, where = error.status_code, f"{request.method} {request.url.path}"
    if status == 404:
        text = f"unknown URL: {where}; GET /openapi.json lists what there is"
        return RequestError(text, status=status, code="unknown_url")
    if status == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return RequestError(f"{where} is not allowed; use {allowed}", status=status)
    text = str(error.detail or HTTPStatus(status).phrase)
    return RequestError(text, status=status)


def in_words(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """The first thing that pydantic found, with the parameter's name and its value if short."""
    first = errors[0]
    path = [part for part in first["loc"] if part != "body"]
    if not path:
        return RequestError("the body must be a JSON object")
    name = str(path[0])
    if first["type"] == "missing":
        return RequestError(f"you must provide the parameter {_dotted(path)}", param=name)
    if first["type"] == "extra_forbidden":
        return RequestError(f"{_dotted(path)} is unknown; leave it out", param=name)
    message = first["msg"].removeprefix("Value error, ")
    if message.startswith("Input should"):
        message = message.replace("Input should", "should", 1)
        value = first.get("input")
        if isinstance(value, str | int | float) and len(repr(value)) <= 40:
            message += f", not {value!r}"
    return RequestError(f"{_dotted(path)} {message}", param=name)


def _dotted(path: Sequence[Any]) -> str:
    """messages[0].content; the names that pydantic gives to the branches of a union are left out"""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif str(part).isidentifier() and part not in BRANCHES:
            text += f".{part}" if text else str(part)
    return text


BRANCHES = {"str", "int", "float", "bool", "text", "texts", "ids", "id_lists", "parts"}
