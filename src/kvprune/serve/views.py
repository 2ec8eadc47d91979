"""The routes beside the completions: models, tokens, health, metrics, the live view, the page."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse

from kvprune.serve.bodies import JsonRoute
from kvprune.serve.completions import as_event
from kvprune.serve.errors import error_response
from kvprune.serve.fleet import (
    Fleet,
    fleet_health,
    rows_of,
    state_of,
    whole_metrics,
    whole_state,
)
from kvprune.serve.metrics import CONTENT_TYPE
from kvprune.serve.protocol import DetokenizeBody, TokenizeBody
from kvprune.serve.request import RequestError, Status
from kvprune.serve.service import Service
from kvprune.serve.streams import EventStream
from kvprune.version import __version__

router = APIRouter(route_class=JsonRoute)
FRAME_SECONDS = 0.05  # between two states of the live view
FLEET_FRAME_SECONDS = 0.25  # the same of several replicas


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """What is served: one model, or several strengths of one."""
    service = _service(request)
    return {"object": "list", "data": [_model(service, name) for name in service.engine.models]}


@router.get("/v1/models/{id:path}")
async def model(id: str, request: Request) -> dict[str, Any]:
    service = _service(request)
    return _model(service, service.check_model(id))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "kvprune",
        "max_model_len": service.engine.positions,
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request) -> dict[str, Any]:
    """The tokens of a text, or of a conversation as the model would read it."""
    service = _service(request)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        messages = [message.plain(f"messages[{i}]") for i, message in enumerate(body.messages)]
        if not messages:
            raise RequestError("messages is an empty list; give at least one", param="messages")
        answer = body.add_generation_prompt is not False
        prompt = await asyncio.to_thread(service.prompts.of_chat, messages, answer)
    else:
        special = body.add_special_tokens is not False
        prompt = await asyncio.to_thread(service.prompts.of_text, body.prompt or "", special)
    tokens = list(prompt.tokens)
    found = {
        "count": len(tokens),
        "max_model_len": service.engine.positions,
        "tokens": tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        found["token_strs"] = [service.texts.label(token) for token in tokens]
    return found


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request) -> dict[str, Any]:
    service = _service(request)
    tokens = service.prompts.of_ids(body.tokens, "tokens").tokens
    return {"prompt": await asyncio.to_thread(service.texts.decode, tokens)}


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> dict[str, Any]:
    """What a client needs to write prompts on its own."""
    tokenizer = _service(request).engine.tokenizer
    info = {
        name: None if getattr(tokenizer, name, None) is None else str(getattr(tokenizer, name))
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    return {
        **info,
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": len(tokenizer),
        "chat_template": tokenizer.chat_template,
    }


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 if requests can be answered, else 503 and why not."""
    service = _service(request)
    if service.fleet is not None:
        status, body = fleet_health(await service.fleet.reports())
        return JSONResponse(body, status)
    try:
        service.check_ready()
    except RequestError as error:
        return error_response(error)
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    service = _service(request)
    if service.fleet is not None:
        text = whole_metrics(await service.fleet.reports(metrics=True))
    else:
        text = service.metrics.text()
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


@router.get("/v1/requests")
async def requests(request: Request) -> dict[str, Any]:
    """The rows of the engine, running and waiting; of all replicas if there are several."""
    service = _service(request)
    if service.fleet is not None:
        rows = rows_of(await service.fleet.reports())
    else:
        rows = [asdict(row) for row in service.engine.status().rows]
    return {"object": "list", "data": rows}


@router.get("/v1/kv")
async def live_view(request: Request) -> Response:
    """Server-sent events: the state of the engine after its steps, the latest one each time."""
    service = _service(request)
    if service.viewers >= service.limits.viewers:
        text = f"{service.viewers} live views are open; the most is {service.limits.viewers}"
        raise RequestError(text, status=429)
    service.viewers += 1

    def close() -> None:
        service.viewers -= 1

    if service.fleet is not None:
        states = _fleet_states(service, service.fleet)
    else:
        states = _states(service)
    return EventStream(states, service.limits.send_seconds, close)


async def _fleet_states(service: Service, fleet: Fleet) -> AsyncGenerator[bytes, None]:
    """Of all replicas, which report now and then; for a while only, or a replica that is to stop
    would wait for its viewers."""
    end = time.monotonic() + service.limits.view_seconds
    while not service.closed and time.monotonic() < end:
        yield as_event(whole_state(await fleet.reports()))
        await asyncio.sleep(FLEET_FRAME_SECONDS)


async def _states(service: Service) -> AsyncGenerator[bytes, None]:
    loop, news = asyncio.get_running_loop(), asyncio.Event()
    latest: Status | None = service.engine.status()

    def sink(status: Status) -> None:
        nonlocal latest
        waiting = latest is not None  # to be taken, of which the loop knows already
        latest = status
        if not waiting:
            try:
                loop.call_soon_threadsafe(news.set)
            except RuntimeError:
                return  # the loop has ended

    forget = service.wake_at_close(news)
    unwatch = service.engine.watch(sink)
    try:
        while not service.closed:
            status, latest = latest, None
            if status is not None:
                yield as_event(state_of(status))
            await asyncio.sleep(FRAME_SECONDS)
            await news.wait()
            news.clear()
    finally:
        unwatch()
        forget()


@router.get("/v1/traces/{id}")
async def trace(id: str, request: Request) -> Response:
    """The explain page of one of the last requests that asked for a report."""
    page = await asyncio.to_thread(_service(request).engine.trace_page, id)
    if page is None:
        text = f"there is no trace of {id[:80]!r}; ask with kvprune.report, and soon after"
        raise RequestError(text, status=404, code="trace_not_found", param="id")
    return HTMLResponse(page)


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page for people."""
    try:
        made = importlib.import_module("kvprune.serve.page").chat_page()
    except ImportError:
        raise RequestError("this installation has no page", status=404) from None
    return HTMLResponse(made, headers={"Cache-Control": "no-cache"})


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service
