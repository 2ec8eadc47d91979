"""A real server over a real engine with the package's small model, and what each request should
get: the same model, one row at a time."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from http_server import events, is_error, serving, until

import kvprune
from helpers import uneven_gates
from kvprune import PrunedCache, tiny
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.serve.engine import Engine

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXTS = [
    "Once upon a time there was a little girl who lived in a house",
    "The dog",
    "One day, Tom and Lily went to the park. They saw a big tree and",
    "She was very happy because she had a new ball. Her mom said",
]


@pytest.fixture(scope="module")
def pruned():
    pruned = kvprune.attach(tiny.load_model().eval(), kvprune.PruningConfig(rank=8))
    uneven_gates(pruned, spread=3.0)
    pruned.tokenizer = load_tokenizer("tiny")
    pruned.tokenizer.chat_template = TEMPLATE
    return pruned


@pytest.fixture(scope="module")
def engine(pruned):
    engine = Engine(pruned, name="tiny", budget="50MB", prefix_budget="10MB", max_rows=8, chunk=32)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine) as (url, _), httpx.Client(base_url=url, timeout=60) as client:
        yield client


@torch.inference_mode()
def alone(pruned, tokens, new):
    """Logits of every token that was read, and the greedy tokens."""
    cache, ids, said = PrunedCache(pruned), torch.tensor([tokens]), []
    logits = []
    while len(said) < new:
        logits.append(pruned.model(ids, past_key_values=cache, use_cache=True).logits[0].float())
        said.append(int(logits[-1][-1].argmax()))
        ids = torch.tensor([said[-1:]])
    return torch.cat(logits), said


def plain(client, **body):
    answer = client.post("/v1/completions", json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_many_at_once_get_what_each_gets_alone(client, pruned):
    def ask(text):
        return plain(client, prompt=text, max_tokens=12, ignore_eos=True, logprobs=0)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, TEXTS * 3))
    for text, answer in zip(TEXTS * 3, answers, strict=True):
        tokens = pruned.tokenizer(text)["input_ids"]
        assert answer["usage"]["prompt_tokens"] == len(tokens)
        wanted = alone(pruned, tokens, 12)[1]
        labels = answer["choices"][0]["logprobs"]["tokens"]
        assert labels == [pruned.tokenizer.decode([token]) for token in wanted]


def test_echoed_log_probabilities_are_the_models(client, pruned):
    """What lm-eval reads, of several prompts in one request."""
    prompts = [pruned.tokenizer(text)["input_ids"] for text in TEXTS]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True}
    choices = plain(client, **body, ignore_eos=True)["choices"]
    for tokens, choice in zip(prompts, choices, strict=True):
        logits, new = alone(pruned, tokens, 1)
        wanted = logits.log_softmax(-1)
        got = choice["logprobs"]["token_logprobs"]
        assert len(got) == len(tokens) + 1
        assert got[0] is None
        following = [*tokens[1:], *new]
        expected = [float(wanted[i, token]) for i, token in enumerate(following)]
        assert got[1:] == pytest.approx(expected, abs=1e-3)
        tops = [max(top.values()) for top in choice["logprobs"]["top_logprobs"][1:]]
        assert tops == pytest.approx(wanted.max(-1).values.tolist(), abs=1e-3)
        # greedy is told by equality of floats
        assert got[-1] == tops[-1]


def test_an_end_token_has_its_entry(client, pruned):
    """Or the last token of the prompt would be cut off as the new one."""
    end = pruned.tokenizer.eos_token_id
    tokens = pruned.tokenizer(TEXTS[0])["input_ids"]
    body = {"prompt": tokens, "max_tokens": 1, "logprobs": 1, "echo": True}
    body["logit_bias"] = {str(end): 100}
    for stream in (False, True):
        if stream:
            answer = client.post("/v1/completions", json={**body, "stream": True})
            choices = [chunk["choices"][0] for chunk in events(answer.text)[:-1]]
        else:
            choices = plain(client, **body)["choices"]
        assert choices[-1]["finish_reason"] == "stop"
        listed = [c["logprobs"]["token_logprobs"] for c in choices if c["logprobs"]]
        assert sum(map(len, listed)) == len(tokens) + 1


def test_stream_equals_whole(client):
    body = {"prompt": TEXTS[2], "max_tokens": 20, "seed": 3, "temperature": 0.8, "n": 2}
    whole = plain(client, **body)
    streamed = client.post("/v1/completions", json={**body, "stream": True})
    chunks = events(streamed.text)[:-1]
    for choice in whole["choices"]:
        parts = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_the_next_turn_reads_only_what_is_new(client):
    messages = [
        {"role": "system", "content": " ".join(TEXTS)},
        {"role": "user", "content": "Tell me a story about a dog and a ball."},
    ]
    first = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 5}).json()
    messages[1]["content"] = "Something else."
    other = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 5}).json()
    system = client.post(
        "/tokenize", json={"messages": messages[:1], "add_generation_prompt": False}
    ).json()["count"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == system


def test_reports_and_their_page(client):
    body = {"prompt": " ".join(TEXTS), "max_tokens": 4, "kvprune": {"report": True}}
    answer = plain(client, **body, ignore_eos=True)
    report = answer["choices"][0]["kvprune"]
    dropped = [pair for drops in report["drops"] for _, pairs in drops["dropped"] for pair in pairs]
    assert dropped
    assert all(token < by for token, by in dropped)
    last = report["drops"][-1]
    held = last["step"] * report["layers"] - len(dropped)
    assert sum(last["kept"]) == held
    assert answer["kvprune"]["kept_share"] == pytest.approx(
        held / last["step"] / report["layers"], abs=1e-5
    )
    page = client.get(f"/v1/traces/{answer['id']}")
    assert page.status_code == 200
    assert "<html" in page.text


def test_settings_of_a_request(client):
    body = {"prompt": " ".join(TEXTS), "max_tokens": 2, "ignore_eos": True}
    shares = [
        plain(client, **body, kvprune={"report": True, "protect_recent": recent})["kvprune"][
            "kept_share"
        ]
        for recent in (0, 1000)
    ]
    assert shares[0] < shares[1] == 1


def test_prefixes(client):
    pinned = client.post("/v1/prefixes", json={"prompt": " ".join(TEXTS)}).json()
    assert pinned["pinned"]
    answer = plain(client, prompt=" ".join(TEXTS) + " and then", max_tokens=2)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == pinned["tokens"]
    assert client.delete(f"/v1/prefixes/{pinned['id']}").json()["deleted"]
    assert is_error(client.delete(f"/v1/prefixes/{pinned['id']}"), 404)


def test_a_client_that_leaves(client, engine):
    body = {"prompt": TEXTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 3}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_text()
        next(pieces)
        until(lambda: len(engine.status().rows) == 3)
    until(lambda: not engine.status().rows, 1.0)
    until(lambda: engine.status().bytes == 0, 1.0)


def test_refusals_of_the_engine(client, engine):
    too_long = {"prompt": "a", "max_tokens": engine.positions}
    refused = client.post("/v1/completions", json=too_long)
    assert is_error(refused, 400, code="context_length_exceeded")
    many = {"prompt": ["a"] * 200, "n": 2}
    assert is_error(client.post("/v1/completions", json=many), 429, code="rate_limit_exceeded")
    until(lambda: not engine.status().rows)


def test_views(client):
    metrics = client.get("/metrics").text
    assert 'kvprune:tokens_dropped_total{layer="0"}' in metrics
    with client.stream("GET", "/v1/kv") as view:
        line = next(line for line in view.iter_lines() if line)
    state = json.loads(line.removeprefix("data: "))
    assert state["budget"] == 50_000_000
    assert state["counters"]["generation_tokens"] > 0
