"""Whatever goes wrong has OpenAI's shape."""

import json

import pytest
from fake_engine import FakeEngine
from http_server import calling, events, is_error, until

from kvprune.serve.limits import Limits
from kvprune.serve.request import RequestError
from kvprune.serve.unsupported import WITHOUT_EFFECT

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}


def test_routes(api):
    assert is_error(api.get("/nothing"), 404, code="unknown_url")
    refused = api.put("/v1/models")
    assert is_error(refused, 405)
    assert refused.headers["allow"] == "GET"
    assert is_error(api.get(CHAT), 405)
    assert is_error(api.get("/v1/models/other"), 404, "model", "model_not_found")
    answer = api.post(PLAIN, json={"prompt": "a", "model": "other"})
    assert is_error(answer, 404, "model", "model_not_found")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"1", b'"x"', b"null", b"{'a': 1}", b"\xff\xfe", b'{"prompt": NaN}',
             b'{"seed": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 40 + b"1" + b"}" * 40],
)  # fmt: skip
def test_bodies_that_are_not_an_object(api, body):
    assert is_error(api.post(PLAIN, content=body, headers=JSON), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_content_types(api, kind):
    body = json.dumps({"prompt": "a"})
    refused = api.post(PLAIN, content=body, headers={"Content-Type": kind})
    assert is_error(refused, 415, code="unsupported_content_type")
    fine = api.post(
        PLAIN, content=body, headers={"Content-Type": "application/json; charset=utf-8"}
    )
    assert fine.status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1), ("temperature", 2.1), ("temperature", "1"), ("temperature", True),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("min_p", 2), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("repetition_penalty", 0), ("seed", 2**63), ("seed", 0.5),
        ("max_tokens", -1), ("max_tokens", "5"), ("n", 0), ("n", 65), ("logprobs", 21),
        ("logprobs", -1), ("stop", ["x"] * 17), ("stop", [""]), ("stop", 3), ("stop", "x" * 2000),
        ("logit_bias", {"257": 1}), ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}), ("logit_bias", [1]), ("stream", "yes"), ("echo", 1),
        ("min_tokens", -1), ("kvprune", {"reprot": True}), ("kvprune", {"report": 1}),
        ("kvprune", {"threshold": "high"}), ("kvprune", {"protect_recent": -1}), ("kvprune", []),
        ("cache_salt", "x" * 300),
    ],
)  # fmt: skip
def test_values(api, name, value):
    refused = api.post(PLAIN, json={"prompt": "a", name: value})
    assert is_error(refused, 400, name)
    assert name in refused.json()["error"]["message"]


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_known_but_unsupported_parameters_are_named(api, name):
    refused = api.post(PLAIN, json={"prompt": "a", name: {"some": "thing"}})
    assert is_error(refused, 400, name, "unsupported_parameter")
    harmless = [None, *WITHOUT_EFFECT[name]]
    for value in harmless:
        assert api.post(PLAIN, json={"prompt": "a", "max_tokens": 1, name: value}).is_success


def test_chat_logprobs_need_logprobs(api):
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert is_error(api.post(CHAT, json={**body, "top_logprobs": 3}), 400, "top_logprobs")
    too_many = {**body, "logprobs": True, "top_logprobs": 21}
    assert is_error(api.post(CHAT, json=too_many), 400, "top_logprobs")


def test_too_long(api):
    refused = api.post(PLAIN, json={"prompt": "a" * 390, "max_tokens": 11})
    assert is_error(refused, 400, code="context_length_exceeded")
    assert "400" in refused.json()["error"]["message"]
    assert api.post(PLAIN, json={"prompt": "a" * 390, "max_tokens": 10}).is_success
    # without a number, what is left
    assert api.post(PLAIN, json={"prompt": "a" * 399}).json()["usage"]["completion_tokens"] == 1


def test_limits(engine):
    limits = Limits(body_bytes=2000, prompts=3, rows=4, depth=3)
    with calling(engine, limits=limits) as api:
        assert is_error(api.post(PLAIN, json={"prompt": ["a"] * 4}), 400, "prompt")
        assert is_error(api.post(PLAIN, json={"prompt": ["a"] * 3, "n": 2}), 400, "n")
        assert is_error(api.post(PLAIN, json={"prompt": "a", "x": [[[1]]]}), 400)
        assert api.post(PLAIN, json={"prompt": "a", "x": [[1]]}).is_success
        large = json.dumps({"prompt": "a", "user": "u" * 3000}).encode()
        assert is_error(api.post(PLAIN, content=large, headers=JSON), 413)
        # without a length; the body is not read to its end
        sent = []

        def pieces():
            for _ in range(100):
                sent.append(1)
                yield b"x" * 1000

        assert is_error(api.post(PLAIN, content=pieces(), headers=JSON), 413)
    assert engine.requests[-1].prompt == engine.requests[0].prompt


def test_the_queue_is_full(api, engine):
    engine.max_waiting = 0
    refused = api.post(PLAIN, json={"prompt": "a"})
    assert is_error(refused, 429, code="rate_limit_exceeded")
    assert refused.headers["retry-after"] == "1"


def test_of_several_prompts_all_run_or_none(engine):
    engine.delay, engine.max_waiting = 0.2, 2
    with calling(engine) as api:
        assert is_error(api.post(PLAIN, json={"prompt": ["a", "b", "c"]}), 429)
    until(lambda: not engine.running)
    assert engine.cancelled == [request.id for request in engine.requests]
    assert len(engine.requests) == 2


def test_time_is_up(engine):
    engine.delay = 0.2
    with calling(engine, limits=Limits(seconds=0.3)) as api:
        refused = api.post(PLAIN, json={"prompt": "a", "max_tokens": 50})
        assert is_error(refused, 408, code="timeout")
        assert refused.headers["x-should-retry"] == "false"
        streamed = api.post(PLAIN, json={"prompt": "a", "max_tokens": 50, "stream": True})
        assert events(streamed.text)[-1]["error"]["code"] == "timeout"
    assert not engine.running


def test_a_dead_engine():
    engine = FakeEngine(delay=0.1)
    engine.start()
    with calling(engine) as api:
        assert api.get("/health").is_success
        engine.die("out of memory")
        for answer in (api.get("/health"), api.post(PLAIN, json={"prompt": "a"})):
            assert is_error(answer, 503)
            assert "out of memory" in answer.json()["error"]["message"]
            assert "retry-after" in answer.headers


def test_an_engine_that_dies_in_the_middle_of_an_answer():
    engine = FakeEngine(delay=0.05)
    engine.start()
    engine.submit = lambda request, sink: engine.die("it broke")
    with calling(engine) as api:
        assert is_error(api.post(PLAIN, json={"prompt": "a"}), 503, code="engine_dead")
        engine.alive = True
        streamed = api.post(PLAIN, json={"prompt": "a", "stream": True})
        assert "it broke" in events(streamed.text)[-1]["error"]["message"]


def test_a_model_that_still_loads(api, engine):
    engine.ready = False
    assert is_error(api.get("/health"), 503, code="loading")
    assert is_error(api.post(PLAIN, json={"prompt": "a"}), 503, code="loading")


def test_what_nobody_foresaw(api, engine, caplog):
    """A 500 with the right shape; neither it nor the log quotes the prompt."""

    def submit(request, sink):
        raise RuntimeError(f"cannot serve {engine.tokenizer.decode(request.prompt)}")

    engine.submit = submit
    refused = api.post(PLAIN, json={"prompt": "my secret"})
    assert is_error(refused, 500)
    assert "secret" not in refused.text
    assert "RuntimeError" in caplog.text
    assert "secret" not in caplog.text
    # an engine's own refusal keeps its words
    engine.submit = lambda request, sink: (_ for _ in ()).throw(
        RequestError("no such setting", param="kvprune")
    )
    assert is_error(api.post(PLAIN, json={"prompt": "a"}), 400, "kvprune")
