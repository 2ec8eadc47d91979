"""/v1/completions: the four kinds of prompts, batches, echo and log-probabilities."""

import json

import pytest
from http_server import is_error

from kvprune.serve.request import Token
from kvprune.serve.responses import CompletionFormat
from kvprune.serve.token_texts import TokenTexts
from model_folders import byte_tokenizer

ROUTE = "/v1/completions"


def ids(text):
    return byte_tokenizer()(text)["input_ids"]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["ab"]),
        (["abc", "de"], ["ab", "de"]),
        (ids("abc"), ["ab"]),
        ([ids("abc"), ids("x")], ["ab", "xx"]),
    ],
)
def test_kinds_of_prompts(api, prompt, texts):
    body = api.post(ROUTE, json={"prompt": prompt, "max_tokens": 2}).json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert [choice["text"] for choice in body["choices"]] == texts
    assert [choice["index"] for choice in body["choices"]] == list(range(len(texts)))
    assert body["usage"]["completion_tokens"] == 2 * len(texts)


def test_several_prompts_and_choices(api, engine):
    body = {"prompt": ["ab", "cd"], "n": 3, "max_tokens": 1}
    answer = api.post(ROUTE, json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == list("aaaccc")
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    # each prompt counts once
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 6
    assert [request.id for request in engine.requests] == [answer["id"], f"{answer['id']}-1"]


def test_default_length(api, engine):
    api.post(ROUTE, json={"prompt": "abc"})
    assert engine.requests[0].max_tokens == 16


def test_echo_with_logprobs_as_lm_eval_reads_it(api, engine):
    """One entry per token of the prompt and one for the new one; the first is null."""
    prompts = [ids("abc"), ids("b")]
    asked = {"max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0, "seed": 1234}
    answer = api.post(ROUTE, json={"prompt": prompts, **asked}).json()
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        sizes = {len(logprobs[name]) for name in logprobs}
        assert sizes == {len(prompt) + 1}
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        greedy = [
            own == max(top.values())
            for own, top in zip(
                logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
            )
        ]
        # the fake engine's rule: odd tokens are the likeliest
        assert greedy == [token % 2 == 1 for token in [*prompt[1:], prompt[0]]]
    assert [choice["text"] for choice in answer["choices"]] == ["abca", "bb"]
    assert answer["choices"][0]["logprobs"]["tokens"] == list("abca")
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert engine.requests[0].prompt_logprobs == 1


def test_echo_alone(api, engine):
    choice = api.post(ROUTE, json={"prompt": "abc", "max_tokens": 0, "echo": True}).json()[
        "choices"
    ][0]
    assert (choice["text"], choice["logprobs"]) == ("abc", None)
    assert engine.requests[0].prompt_logprobs is None


def test_no_alternatives(api):
    answer = api.post(ROUTE, json={"prompt": "ab", "max_tokens": 1, "logprobs": 0}).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5]
    assert logprobs["top_logprobs"] == [{"a": -0.5}]


def test_tokens_of_the_same_text_count_as_the_likelier_one():
    """Or a token that is not the likeliest would look as if it were."""
    texts = TokenTexts(byte_tokenizer())
    texts.label = {3: "x", 4: "x", 5: "y"}.get
    texts.text = lambda token: "?"
    form = CompletionFormat("id", "model", 0, texts, True, False)
    token = Token(4, -3.0, ((3, -0.5), (5, -1.0)))
    assert form._top(token) == {"x": -0.5, "y": -1.0}
    assert form._top(Token(4, float("-inf"))) == {"x": -9999.0}


def test_halves_of_characters_have_names_of_their_own():
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    first, second = tokenizer("é")["input_ids"]
    assert (texts.label(first), texts.label(second)) == (r"bytes:\xc3", r"bytes:\xa9")
    assert texts.bytes(first) + texts.bytes(second) == "é".encode()
    assert texts.label(ids("a")[0]) == "a"


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], [""], [[1], []], [1, "a"], ["a", 1], [[1], 2], {"a": 1}, None, [True], [-1],
     [257], [[1], [100_000]], "\ud800"],
)  # fmt: skip
def test_prompts_that_cannot_be_read(api, prompt):
    body = json.dumps({"prompt": prompt})
    answer = api.post(ROUTE, content=body, headers={"Content-Type": "application/json"})
    assert is_error(answer, 400, "prompt")


def test_a_prompt_is_required(api):
    assert is_error(api.post(ROUTE, json={}), 400, "prompt")
