"""What stands in Ray's proxies: which conversation it is, and errors in OpenAI's shape."""

import asyncio
import json

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from http_server import events, is_error

from helpers import in_own_loop
from kvprune.serve.ray import front
from kvprune.serve.ray.front import MOST_BYTES, SESSION_HEADER, Front, conversation, middlewares

SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "Why?"}


def of(**body):
    return conversation(json.dumps(body).encode())


def test_turns_of_a_conversation_share_its_name():
    first = of(messages=[SYSTEM, ASK])
    turns = [SYSTEM, ASK, {"role": "assistant", "content": "So."}, {**ASK, "content": "Oh?"}]
    assert of(messages=turns, temperature=0.3) == first
    assert of(messages=[SYSTEM, {**ASK, "content": "How?"}]) != first  # or all meet in one replica
    assert of(messages=[SYSTEM, ASK], cache_salt="a") != first
    assert of(messages=[SYSTEM, ASK], model="other") != first


def test_texts_that_begin_alike_share_a_name():
    text = "Once upon a time there was a girl who lived in a house by the sea. "
    assert of(prompt=text + "One day") == of(prompt=text + "Another") == of(prompt=[text])
    assert of(prompt=text) != of(prompt="The " + text)
    ids = list(range(30))
    assert of(prompt=ids) == of(prompt=[*ids, 1]) == of(prompt=[ids])
    assert of(prompt=ids) != of(prompt=ids[1:])


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"3", b"{}", b'{"messages": []}', b'{"messages": [1]}', b'{"prompt": []}',
     b'{"prompt": [[]]}', b'{"prompt": {}}', b'{"messages": [{}]}', b"\xff", b"[" * 100_000],
)  # fmt: skip
def test_what_no_replica_accepts_has_no_name(body):
    assert conversation(body) is None


def behind():
    """What a request looks like behind the front, and Ray's ways to fail."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def seen(path: str, request: Request):
        if path == "ray":
            status = int(request.query_params["status"])
            return PlainTextResponse("Traceback: secret", status)
        if path == "metrics":
            return PlainTextResponse("kvprune:info 1")
        if path == "own":
            return JSONResponse({"error": "ours"}, 429)
        if path == "stream":
            return StreamingResponse(iter([b"data: 1\n\n"]), media_type="text/event-stream")
        body = await request.body()
        return {"session": request.headers.get(SESSION_HEADER), "bytes": len(body)}

    return app


def calls(app, *requests):
    async def run():
        transport = httpx.ASGITransport(Front(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return [await client.request(method, url, **more) for method, url, more in requests]

    return in_own_loop(run())


def test_the_session_that_a_replica_is_chosen_by():
    body = {"messages": [ASK]}
    named = {"json": body, "headers": {SESSION_HEADER: "mine"}}
    large = {"json": {"prompt": "x" * MOST_BYTES}}
    trace = "/v1/traces/chatcmpl-ab12cd34-" + "0" * 32
    chat, given, big, other, traced, unknown = calls(
        behind(),
        ("POST", "/v1/chat/completions", {"json": body}),
        ("POST", "/v1/chat/completions", named),
        ("POST", "/v1/completions", large),
        ("POST", "/tokenize", {"json": body}),
        ("GET", trace, {}),
        ("GET", "/v1/traces/chatcmpl-" + "0" * 32, {}),
    )
    assert chat.json() == {"session": of(**body), "bytes": len(chat.request.content)}
    assert given.json()["session"] == "mine"
    assert big.json() == {"session": None, "bytes": len(big.request.content)}
    assert other.json() == {"session": None, "bytes": len(other.request.content)}
    assert traced.json()["session"] == "replica:ab12cd34"
    assert unknown.json()["session"] is None


def test_a_body_that_comes_slowly_is_left_to_the_replica(monkeypatch):
    """Which has a limit for it; what was read here is read there."""
    monkeypatch.setattr(front, "READ_SECONDS", 0.05)
    body = json.dumps({"messages": [ASK]}).encode()

    async def slowly():
        yield body[:10]
        await asyncio.sleep(0.2)
        yield body[10:]

    headers = {"content-type": "application/json"}
    slow = {"content": slowly(), "headers": headers}
    (answer,) = calls(behind(), ("POST", "/v1/completions", slow))
    assert answer.json() == {"session": None, "bytes": len(body)}


@pytest.mark.parametrize(("status", "becomes"), [(404, 503), (500, 503), (503, 503), (429, 429)])
def test_words_of_ray_become_openais_errors(status, becomes):
    (answer,) = calls(behind(), ("GET", f"/ray?status={status}", {}))
    assert is_error(answer, becomes)
    assert int(answer.headers["retry-after"]) > 0
    assert "secret" not in answer.text


def test_answers_of_replicas_pass():
    own, metrics, stream = calls(
        behind(), ("GET", "/own", {}), ("GET", "/metrics", {}), ("GET", "/stream", {})
    )
    assert (own.status_code, own.json()) == (429, {"error": "ours"})
    assert metrics.text == "kvprune:info 1"
    assert stream.text == "data: 1\n\n"


def test_a_replica_that_is_gone_before_it_answers():
    """Ray then sends nothing at all."""

    async def silent(scope, receive, send):
        pass

    (answer,) = calls(silent, ("GET", "/v1/models", {}))
    assert is_error(answer, 503, code="replica_lost")


def test_a_stream_that_breaks_off_ends_with_an_error():
    async def cut(scope, receive, send):
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})

    (answer,) = calls(cut, ("GET", "/", {}))
    first, last = events(answer.text)
    assert first == 1
    assert last["error"]["code"] == "replica_lost"


def test_rays_own_paths_are_left_alone():
    async def routes(scope, receive, send):
        await PlainTextResponse("no routes yet", 503)(scope, receive, send)

    (answer,) = calls(routes, ("GET", "/-/routes", {}))
    assert answer.text == "no routes yet"


def test_as_ray_takes_it():
    (made,) = middlewares()
    assert made.cls is Front
