"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvprune.serve import request as engine_request
from kvprune.serve.bodies import JsonRoute
from kvprune.serve.errors import error_body
from kvprune.serve.prompts import Prompt
from kvprune.serve.protocol import ChatBody, CompletionBody, Generation
from kvprune.serve.request import RequestError
from kvprune.serve.responses import ChatFormat, Choice, CompletionFormat, Format, usage
from kvprune.serve.security import log_failure
from kvprune.serve.service import Service
from kvprune.serve.streams import Answer, ClientGone, EventStream, unless_gone

router = APIRouter(route_class=JsonRoute)
log = logging.getLogger("kvprune.serve")
DEFAULT_COMPLETION = 16  # OpenAI's


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    service = _service(request, body)
    messages = body.plain_messages()
    go_on = bool(body.continue_final_message)
    answer = body.add_generation_prompt is not False
    prompt = await asyncio.to_thread(service.prompts.of_chat, messages, answer, go_on)
    form = ChatFormat(
        service.new_id("chatcmpl"), service.check_model(body.model), int(time.time()),
        service.texts, bool(body.logprobs), body.pruning.report,
    )  # fmt: skip
    new = service.new_tokens(prompt, body.limit, None)
    return await _answer(service, request, body, form, [prompt], [new], body.alternatives)


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request) -> Response:
    """Continue a text, a list of token ids, or several of either."""
    service = _service(request, body)
    special = body.add_special_tokens is not False
    prompts = [
        await asyncio.to_thread(service.prompts.of_text, prompt, special)
        if isinstance(prompt, str)
        else service.prompts.of_ids(prompt)
        for prompt in body.prompts()
    ]
    form = CompletionFormat(
        service.new_id("cmpl"), service.check_model(body.model), int(time.time()),
        service.texts, body.logprobs is not None, body.pruning.report, echo=bool(body.echo),
    )  # fmt: skip
    new = [service.new_tokens(prompt, body.max_tokens, DEFAULT_COMPLETION) for prompt in prompts]
    return await _answer(service, request, body, form, prompts, new, body.logprobs)


def _service(request: Request, body: Generation) -> Service:
    service: Service = request.app.state.service
    service.check_ready()
    service.check_model(body.model)
    body.check(service.limits)
    return service


async def _answer(
    service: Service,
    request: Request,
    body: Generation,
    form: Format,
    prompts: Sequence[Prompt],
    new_tokens: Sequence[int],
    logprobs: int | None,
) -> Response:
    echo = isinstance(form, CompletionFormat) and form.echo
    requests = [
        engine_request.Request(
            id=form.id if number == 0 else f"{form.id}-{number}",
            prompt=prompt.tokens,
            max_tokens=new,
            sampling=body.sampling(service.engine.vocabulary),
            n=body.choices,
            stop=body.stops,
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=body.min_tokens or 0,
            ignore_eos=bool(body.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
            report=body.pruning.report,
            settings=body.settings,
            boundaries=prompt.boundaries,
            salt=body.cache_salt or "",
            model=form.model,
        )
        for number, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True))
    ]
    n = body.choices
    choices = [Choice(number, prompts[number // n]) for number in range(len(prompts) * n)]
    answer = Answer(service.engine, requests, service.clock, service.limits, bool(body.stream))
    answer.submit()
    service.answers.add(answer)
    for prompt in prompts:
        service.metrics.observe("request_prompt_tokens", len(prompt.tokens), form.model)

    def close() -> None:
        answer.cancel()
        service.answers.discard(answer)

    headers = {"x-request-id": form.id}
    if body.stream:
        parts = _stream(answer, choices, form, body)
        return EventStream(parts, service.limits.send_seconds, close, headers)
    try:
        await unless_gone(request.receive, _collect(answer, choices))
    except ClientGone:
        return Response(status_code=499)
    finally:
        close()
    return JSONResponse(form.whole(choices), headers=headers)


async def _collect(answer: Answer, choices: Sequence[Choice]) -> None:
    async for batch in answer.events():
        for number, event in batch:
            choices[number].add(event)


async def _stream(
    answer: Answer, choices: Sequence[Choice], form: Format, body: Generation
) -> AsyncGenerator[bytes, None]:
    try:
        async for batch in answer.events():
            parts = [] if batch else [b": ping\n\n"]
            for number, event in batch:
                choices[number].add(event)
                for chunk in form.chunks(choices[number], event):
                    if body.include_usage:
                        chunk["usage"] = usage(choices) if body.continuous_usage else None
                    parts.append(as_event(chunk))
            if parts:
                yield b"".join(parts)
        if body.include_usage:
            yield as_event(form.last_chunk(choices))
        yield b"data: [DONE]\n\n"
    except RequestError as error:
        # the status has been sent: clients look for the error in the stream
        yield as_event(error_body(error))
    except Exception as error:
        log_failure(log, error)
        yield as_event(error_body(RequestError("internal error", status=500)))


def as_event(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()
