"""Clients that nobody here wrote, against a real server with a fake engine."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from http_server import serving

openai = pytest.importorskip("openai", reason="the openai package is a development dependency")

HELLO = [{"role": "user", "content": "hello"}]
SAID = "<user>hello</user><assistant>"


@pytest.fixture
def client(engine):
    with (
        serving(engine, keys=["secret"]) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client


def test_openai_chat(client):
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_completion_tokens=6, n=2, logprobs=True, top_logprobs=1
    )
    assert [choice.message.content for choice in answer.choices] == ["<user>"] * 2
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].logprobs.content[1].top_logprobs[0].token == "u"
    assert answer.usage.completion_tokens == 12
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    assert answer.kvprune["dense_bytes"] > answer.kvprune["bytes"]
    assert answer._request_id == answer.id


def test_openai_stream(client):
    options = {"include_usage": True}
    body = {"kvprune": {"report": True}}
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=29, stream=True, stream_options=options,
            extra_body=body,
        )
    )  # fmt: skip
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == SAID
    assert chunks[-1].usage.completion_tokens == 29
    reports = [chunk.kvprune for chunk in chunks if "kvprune" in chunk.model_extra]
    assert len([report["drops"] for report in reports if "drops" in report]) == 29


def test_openai_stream_helper(client):
    with client.chat.completions.stream(model="fake", messages=HELLO, stop="o") as stream:
        assert stream.get_final_completion().choices[0].message.content == "<user>hell"


def test_openai_completions(client):
    answer = client.completions.create(
        model="fake", prompt=["abc", "de"], max_tokens=2, logprobs=2, echo=True
    )
    assert [choice.text for choice in answer.choices] == ["abcab", "dede"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    streamed = client.completions.create(model="fake", prompt="abc", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "abc"


def test_openai_errors(client, engine):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="maximum context length") as error:
        client.chat.completions.create(model="fake", messages=HELLO, max_tokens=10_000)
    assert (error.value.code, error.value.type) == (
        "context_length_exceeded", "invalid_request_error",
    )  # fmt: skip
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    engine.max_waiting = 0
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="fake", prompt="a")
    engine.max_waiting = 9
    engine.error = openai_failure()
    stream = client.completions.create(model="fake", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="it broke"):
        list(stream)


def openai_failure():
    from kvprune.serve.request import RequestError

    return RequestError("it broke", status=500)


def test_openai_models(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").max_model_len == 400


def test_openai_retries_when_the_queue_is_full(client, engine):
    engine.max_waiting = 0
    refused = []
    submit = engine.submit

    def second_time(request, sink):
        refused.append(request)
        engine.max_waiting = 9 if len(refused) > 1 else 0
        submit(request, sink)

    engine.submit = second_time
    answer = client.with_options(max_retries=2).completions.create(
        model="fake", prompt="abc", max_tokens=1
    )
    assert (answer.choices[0].text, len(refused)) == ("a", 2)


def test_openai_async(engine):
    async def ask(url):
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answers = await asyncio.gather(
                *(client.completions.create(model="fake", prompt=p, max_tokens=3) for p in "abcd")
            )
            stream = await client.chat.completions.create(
                model="fake", messages=HELLO, max_tokens=6, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        return [answer.choices[0].text for answer in answers], "".join(pieces)

    with serving(engine) as (url, _):
        # in a thread of its own: browsers under test leave a loop running in this one
        with ThreadPoolExecutor(1) as thread:
            found = thread.submit(asyncio.run, ask(url)).result(60)
        assert found == (["aaa", "bbb", "ccc", "ddd"], "<user>")


def test_langchain(engine):
    chat_models = pytest.importorskip("langchain_openai", reason="a development dependency")
    with serving(engine) as (url, _):
        chat = chat_models.ChatOpenAI(
            base_url=f"{url}/v1", api_key="none", model="fake", max_tokens=6, temperature=0
        )
        answer = chat.invoke([("system", "be brief"), ("user", "hello")])
        assert answer.content == "<syste"
        assert answer.usage_metadata["output_tokens"] == 6
        # LangChain renames max_tokens
        assert engine.requests[0].max_tokens == 6
        pieces = list(chat.stream("hello", stop=["r>"]))
        assert "".join(piece.content for piece in pieces).startswith("<use")
        plain = chat_models.OpenAI(base_url=f"{url}/v1", api_key="none", model="fake", max_tokens=3)
        assert plain.invoke("abc") == "abc"
        assert [a.content for a in chat.batch(["a", "b"])] == ["<user>", "<user>"]
        chat.root_client.close()


def test_litellm(engine, monkeypatch):
    # or it asks the network for a table of prices when it is imported
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="a development dependency")
    with serving(engine) as (url, _):
        known = {"model": "openai/fake", "api_base": f"{url}/v1", "api_key": "none"}
        answer = litellm.completion(messages=HELLO, max_tokens=6, **known)
        assert answer.choices[0].message.content == "<user>"
        stream = litellm.completion(messages=HELLO, max_tokens=6, stream=True, **known)
        assert "".join(c.choices[0].delta.content or "" for c in stream) == "<user>"
        plain = {**known, "model": "text-completion-openai/fake"}
        text = litellm.text_completion(prompt="abc", max_tokens=3, **plain)
        assert text.choices[0].text == "abc"
        with pytest.raises(litellm.exceptions.BadRequestError):
            litellm.completion(messages=HELLO, max_tokens=10_000, num_retries=0, **known)
