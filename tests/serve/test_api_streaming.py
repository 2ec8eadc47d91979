"""Streams: exactly the chunks that OpenAI sends, and comments while nothing happens."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from http_server import calling, events, is_error, serving, until

from kvprune.serve.clock import Clock
from kvprune.serve.limits import Limits
from kvprune.serve.request import Request, RequestError
from kvprune.serve.streams import Answer

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def test_a_chat(api):
    answer = api.post(CHAT, json={**HELLO, "max_tokens": 3, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "<"}, {"content": "u"}, {"content": "s"}, {},
    ]  # fmt: skip
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None, None, None, None, "length"]
    assert chunks[-1]["kvprune"]["dense_bytes"] > chunks[-1]["kvprune"]["bytes"]


@pytest.mark.parametrize("route", [CHAT, PLAIN])
def test_usage(api, route):
    body = {**HELLO, "prompt": "hello", "max_tokens": 2, "stream": True}
    whole = api.post(route, json={**body, "stream": False}).json()["usage"]
    options = {"stream_options": {"include_usage": True}}
    *chunks, last, done = events(api.post(route, json={**body, **options}).text)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], whole)
    options["stream_options"]["continuous_usage_stats"] = True
    *chunks, last, done = events(api.post(route, json={**body, **options}).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 2
    options["stream_options"] = {"include_usage": False}
    chunks = events(api.post(route, json={**body, **options}).text)[:-1]
    assert not any("usage" in chunk for chunk in chunks)


def test_stream_options_need_a_stream(api):
    body = {**HELLO, "stream_options": {"include_usage": True}}
    assert is_error(api.post(CHAT, json=body), 400, "stream_options")


def test_the_stream_says_what_the_whole_answer_says(api):
    body = {"prompt": ["abc", "dé"], "n": 2, "max_tokens": 5, "logprobs": 1, "echo": True}
    whole = api.post(PLAIN, json=body).json()["choices"]
    chunks = events(api.post(PLAIN, json={**body, "stream": True}).text)[:-1]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    for choice in whole:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name, values in choice["logprobs"].items():
            joined = [v for part in parts if part["logprobs"] for v in part["logprobs"][name]]
            assert joined == values


def test_chat_logprobs(api):
    body = {**HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    whole = api.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    chunks = events(api.post(CHAT, json={**body, "stream": True}).text)[:-1]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in logprobs if part for entry in part["content"]] == whole


def test_the_report(api):
    body = {**HELLO, "max_tokens": 2, "stream": True, "kvprune": {"report": True}}
    reports = [c["kvprune"] for c in events(api.post(CHAT, json=body).text)[:-1] if "kvprune" in c]
    prompt = [token["text"] for token in reports[0]["prompt_tokens"]]
    assert "".join(prompt) == "<user>hello</user><assistant>"
    assert not any("prompt_tokens" in report for report in reports[1:])
    assert [token["text"] for r in reports for token in r.get("tokens", [])] == ["<", "u"]
    assert reports[0]["drops"]["dropped"] == [[1, [[0, len(prompt)]]]]
    assert reports[0]["layers"] == 2


def test_a_refusal_before_the_stream_has_a_status(api):
    body = {**HELLO, "stream": True, "max_tokens": 1000}
    assert is_error(api.post(CHAT, json=body), 400, code="context_length_exceeded")


def test_an_error_after_the_headers_is_an_event(api, engine):
    engine.error = RequestError("no room", status=400, code="context_length_exceeded")
    answer = api.post(CHAT, json={**HELLO, "stream": True})
    assert answer.status_code == 200
    [only] = events(answer.text)
    assert only["error"] == {
        "message": "no room", "type": "invalid_request_error", "param": None,
        "code": "context_length_exceeded",
    }  # fmt: skip
    # the same, not streamed, has a status
    assert is_error(api.post(CHAT, json=HELLO), 400, code="context_length_exceeded")


def test_pings_while_nothing_comes(engine):
    engine.delay = 0.3
    with calling(engine, limits=Limits(ping_seconds=0.1)) as api:
        answer = api.post(CHAT, json={**HELLO, "max_tokens": 1, "stream": True})
    assert answer.text.startswith(": ping\n\n")
    assert events(answer.text)[-1] == "[DONE]"


def test_chunks_arrive_one_by_one(engine):
    engine.delay = 0.05
    body = {"prompt": "abc", "max_tokens": 4, "stream": True}
    with serving(engine) as (url, _), httpx.stream("POST", url + PLAIN, json=body) as answer:
        pieces = [piece for piece in answer.iter_text() if piece]
    assert len(pieces) >= 4


def test_a_client_that_takes_nothing_is_dropped(engine):
    engine.positions = 10_000_000
    body = {"prompt": "abc" * 50, "max_tokens": 9_000_000, "stream": True}
    body["kvprune"] = {"report": True}  # larger chunks: the network's buffers are full sooner
    limits = Limits(send_seconds=0.4, unsent=10**9)
    with serving(engine, limits=limits) as (url, server):
        with httpx.stream("POST", url + PLAIN, json=body, timeout=10):
            until(lambda: engine.cancelled, 10)
            until(lambda: not engine.running)
        until(lambda: not server._service.answers)


def test_what_waits_for_a_slow_client_is_bounded(engine):
    """Also while nobody looks at it, as a blocked connection keeps its sender from doing."""

    async def ask():
        request = Request("slow", (1, 2, 3), 100_000)
        clock = Clock(None, engine.watch)
        clock.see_events = lambda id, events: None
        answer = Answer(engine, [request], clock, Limits(unsent=50))
        answer.submit()
        await asyncio.to_thread(until, lambda: engine.cancelled)
        assert 50 < len(answer._events) < 60
        with pytest.raises(RequestError, match="too slowly"):
            async for _ in answer.events():
                pass

    # in a thread of its own: browsers under test leave a loop running in this one
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, ask()).result(60)
    assert engine.cancelled == ["slow"]
