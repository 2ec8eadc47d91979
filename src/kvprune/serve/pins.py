"""/v1/prefixes: texts that are read once and kept for later requests."""

from __future__ import annotations

import asyncio
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
    try:
        id = service.engine.pin(prompt.tokens, settings, body.cache_salt or "", sink)
    except PruneError as error:
        raise RequestError(str(error), param="kvprune") from error
    try:
        await unless_gone(request.receive, _until(done, service))
    except ClientGone:
        return Response(status_code=499)  # it is read all the same, for others
    if last[-1].finish == "error":
        raise last[-1].error or RequestError("the engine failed", status=500)
    kept = next((found for found in service.engine.prefixes() if found["id"] == id), {})
    return JSONResponse({"object": "prefix", "id": id, "tokens": len(prompt.tokens), **kept})


async def _until(done: asyncio.Event, service: Service) -> None:
    while not done.is_set():
        await asyncio.wait({asyncio.ensure_future(done.wait())}, timeout=0.5)
        if not done.is_set() and not service.engine.alive:
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
    if not service.engine.unpin(id):
        text = f"there is no prefix {id[:80]!r}; GET /v1/prefixes lists them"
        raise RequestError(text, status=404, code="prefix_not_found", param="id")
    return {"id": id, "object": "prefix", "deleted": True}
