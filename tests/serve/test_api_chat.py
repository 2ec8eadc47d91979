"""/v1/chat/completions with an engine that says the prompt back."""

import pytest
from fake_engine import FakeEngine
from http_server import calling, is_error

from kvprune.serve.request import Settings
from model_folders import byte_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
ROUTE = "/v1/chat/completions"


def test_an_answer(api, engine):
    answer = api.post(ROUTE, json={"model": "fake", "messages": HELLO, "max_tokens": 6})
    assert answer.status_code == 200
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["id"] == answer.headers["x-request-id"] == engine.requests[0].id
    assert body["model"] == "fake"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "<user>", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    size = len("<user>hello</user><assistant>")
    assert body["usage"] == {
        "prompt_tokens": size,
        "completion_tokens": 6,
        "total_tokens": size + 6,
        "prompt_tokens_details": {"cached_tokens": size // 2},
    }
    seen = size + 5
    share = (seen + seen // 2) / (2 * seen)
    assert body["kvprune"] == {
        "kept_share": pytest.approx(share, abs=1e-6), "bytes": 10 * seen, "dense_bytes": 20 * seen,
    }  # fmt: skip


def test_every_field_reaches_the_engine(api, engine):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.2,
        "frequency_penalty": -0.3, "repetition_penalty": 1.1, "logit_bias": {"5": 2},
        "seed": -3,
    }  # fmt: skip
    others = {
        "n": 2, "stop": ["x", "yz"], "min_tokens": 1, "ignore_eos": True,
        "max_completion_tokens": 4, "include_stop_str_in_output": True, "cache_salt": "mine",
        "user": "me", "unknown": [1],
        "kvprune": {"threshold": 0.25, "protect_recent": 9},
        "logprobs": True, "top_logprobs": 2, "tools": [], "response_format": {"type": "text"},
    }  # fmt: skip
    answer = api.post(ROUTE, json={"messages": HELLO, **fields, **others})
    assert answer.status_code == 200, answer.text
    request = engine.requests[0]
    got = vars(request.sampling)
    assert got == {**fields, "logit_bias": {5: 2.0}}
    assert (request.n, request.stop, request.min_tokens, request.ignore_eos) == (
        2, ("x", "yz"), 1, True,
    )  # fmt: skip
    assert (request.max_tokens, request.include_stop, request.salt) == (4, True, "mine")
    assert request.settings == Settings(0.25, 9)
    assert (request.logprobs, request.prompt_logprobs, request.report) == (2, None, False)
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]


def test_defaults_are_openais(api, engine):
    api.post(ROUTE, json={"messages": HELLO, "temperature": None, "top_p": None, "stop": None})
    request = engine.requests[0]
    assert (request.sampling.temperature, request.sampling.top_p, request.n) == (1.0, 1.0, 1)
    assert request.max_tokens == engine.positions - len(request.prompt)
    assert request.logprobs is None


def test_logprobs(api):
    asked = {"logprobs": True, "top_logprobs": 1, "max_tokens": 2}
    answer = api.post(ROUTE, json={"messages": HELLO, **asked})
    first, second = answer.json()["choices"][0]["logprobs"]["content"]
    # "<" is even: the likeliest is another
    assert first == {
        "token": "<", "logprob": -1.5, "bytes": [60],
        "top_logprobs": [{"token": "=", "logprob": -0.5, "bytes": [61]}],
    }  # fmt: skip
    assert second["top_logprobs"] == [{"token": "u", "logprob": -0.5, "bytes": [117]}]


def test_the_report(api):
    body = {"messages": HELLO, "max_tokens": 2, "kvprune": {"report": True}}
    report = api.post(ROUTE, json=body).json()["choices"][0]["kvprune"]
    assert [token["text"] for token in report["tokens"]] == ["<", "u"]
    assert "".join(token["text"] for token in report["prompt_tokens"]).startswith("<user>hello")
    size = len(report["prompt_tokens"])
    assert [drops["step"] for drops in report["drops"]] == [size, size + 1]
    assert report["drops"][0]["dropped"] == [[1, [[0, size]]]]
    assert report["layers"] == 2


def test_boundaries_are_true_prefixes(api, engine):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    api.post(ROUTE, json={"messages": messages, "max_tokens": 1})
    system = len("<system>be brief</system>")
    assert engine.requests[0].boundaries == (
        system,
        system + len("<user>one</user><assistant>two</assistant>"),
    )
    api.post(ROUTE, json={"messages": messages[1:2], "max_tokens": 1})
    assert engine.requests[1].boundaries == ()


def test_a_template_that_rewrites_its_start_has_no_boundary():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    engine = FakeEngine(tokenizer)
    engine.start()
    try:
        with calling(engine) as api:
            messages = [{"role": "system", "content": "a"}, *HELLO]
            assert api.post(ROUTE, json={"messages": messages, "max_tokens": 1}).status_code == 200
        assert engine.requests[0].boundaries == ()
    finally:
        engine.stop()


def test_content_parts_and_developers(api, engine):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    api.post(ROUTE, json={"messages": messages, "max_tokens": 1})
    text = engine.tokenizer.decode(engine.requests[0].prompt)
    assert text == "<system>be</system><user>hello</user><assistant>"


def test_the_last_message_goes_on(api, engine):
    messages = [*HELLO, {"role": "assistant", "content": "I thin"}]
    body = {"messages": messages, "max_tokens": 1}
    api.post(ROUTE, json={**body, "continue_final_message": True})
    api.post(ROUTE, json={**body, "add_generation_prompt": False})
    texts = [engine.tokenizer.decode(request.prompt) for request in engine.requests]
    start = "<user>hello</user><assistant>I thin"
    assert texts == [start, f"{start}</assistant>"]
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert is_error(api.post(ROUTE, json={**body, **both}), 400, "continue_final_message")


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"role": "user"}],
        [{"role": "robot", "content": "hi"}],
        [{"content": "hi"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "tool", "content": "hi", "tool_call_id": "1"}],
        [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
        [*HELLO, {"role": "system", "content": "late"}],  # this template refuses it
        "hello",
        None,
    ],
)
def test_messages_that_cannot_be_read(api, messages):
    assert is_error(api.post(ROUTE, json={"messages": messages}), 400, "messages")


def test_a_model_without_a_template():
    engine = FakeEngine(byte_tokenizer())
    with calling(engine) as api:
        answer = api.post(ROUTE, json={"messages": HELLO})
    assert is_error(answer, 400, "messages", "no_chat_template")
    assert "/v1/completions" in answer.json()["error"]["message"]


def test_stop_strings(api):
    body = {"messages": HELLO, "max_tokens": 50, "stop": "r>"}
    choice = api.post(ROUTE, json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "r>")
