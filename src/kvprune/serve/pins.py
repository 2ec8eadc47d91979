"""/v1/prefixes: texts that are read once and kept for later requests."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvprune.errors import PruneError
from kvprune.serve.bodies import JsonRoute
from kvprune.serve.prompts import Prompt
from kvprune.serve.protocol import PrefixBody, Pruning
from kvprune.serve.request import Event, RequestError, Settings
from kvprune.serve.service import Service
from kvprune.serve.streams import ClientGone, dead, unless_gone

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/prefixes")
async def prefixes(request: Request) -> dict[str, Any]:
    """What is kept, pinned or not."""
    service: Service = request.app.state.service
    return {"object": "list", "data": service.engine.prefixes()}


@router.post("/v1/prefixes")
async def pin(body: PrefixBody, request: Request) -> Response:
    """Read a text or the first messages of chats, and keep them until they are deleted."""
    service: Service = request.app.state.service
    service.check_ready()
    model = service.check_model(body.model)
    prompt = await _prompt(service, body)
    service.new_tokens(prompt, 0, None)  # refused here if it is empty or too long
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    last: list[Event] = []

    def sink(events: list[Event]) -> None:
        last.extend(event for event in events if event.finish is not None)
        if last:
            loop.call_soon_threadsafe(done.set)

    pruning = body.kvprune or Pruning()
    settings = Settings(pruning.threshold, pruning.protect_recent)
    before = {found["id"] for found in service.engine.prefixes()}
    try:
        service.engine.pin(prompt.tokens, settings, body.cache_salt or "", sink, model)
    except PruneError as error:
        raise RequestError(str(error), param="kvprune") from error
    try:
        await unless_gone(request.receive, _until(done, service))
    except ClientGone:
        return Response(status_code=499)  # it is read all the same, for others
    if last[-1].finish == "error":
        raise last[-1].error or RequestError("the engine failed", status=500)
    size = len(prompt.tokens)
    pinned = [p for p in service.engine.prefixes() if p["pinned"] and p["tokens"] == size]
    if not pinned:
        raise RequestError(
            "there is no room for this prefix; delete another, or start the server with a larger "
            "--prefix-budget",
            param="prompt",
        )
    # a new one, unless it was kept before
    new = [found for found in pinned if found["id"] not in before]
    return JSONResponse({"object": "prefix", **(new or pinned)[-1]})


async def _until(done: asyncio.Event, service: Service) -> None:
    while True:
        with suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(done.wait(), 0.5)
            return
        if not service.engine.alive:
            raise dead(service.engine)


async def _prompt(service: Service, body: PrefixBody) -> Prompt:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.messages is not None:
        messages = [message.plain(f"messages[{i}]") for i, message in enumerate(body.messages)]
        if not messages:
            raise RequestError("messages is an empty list; give at least one", param="messages")
        return await asyncio.to_thread(service.prompts.of_chat, messages, False)
    if isinstance(body.prompt, str):
        return await asyncio.to_thread(service.prompts.of_text, body.prompt)
    return service.prompts.of_ids(body.prompt or [])


@router.delete("/v1/prefixes/{id}")
async def unpin(id: str, request: Request) -> dict[str, Any]:
    """Forget one."""
    service: Service = request.app.state.service
    if not await asyncio.to_thread(service.engine.unpin, id):
        text = f"there is no prefix {id[:80]!r}; GET /v1/prefixes lists them"
        raise RequestError(text, status=404, code="prefix_not_found", param="id")
    return {"id": id, "object": "prefix", "deleted": True}
