"""Two replicas of the small model on Ray, from their start to their end, in one test: what is
started once is started by one worker of pytest."""

import itertools
import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import httpx
import openai
import torch
from deployment import KEY, REPLACE_SECONDS, Stream, deployed
from http_server import is_error, until

from kvprune import tiny
from kvprune.adapters.pretrained import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TEXTS = [
    f"{start} {who}"
    for start in ("Once upon a time there was", "One day", "They saw", "Her mom said to")
    for who in ("a little girl", "the dog", "Tom and Lily", "a big tree", "a red ball")
]
ROWS, WAITING = 4, 8


def test_two_replicas(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    with deployed(
        tmp_path, "--replicas", "2", "--cpus", "0.5", "--template", str(template),
        "--kv-budget", "50MB", "--max-rows", str(ROWS), "--max-waiting", str(WAITING),
    ) as deployment:  # fmt: skip
        deployment.until_two()
        many_requests(deployment)
        a_conversation_stays(deployment)
        views_of_all(deployment)
        a_client_that_leaves(deployment)
        too_many_requests(deployment)
        a_replica_is_killed(deployment)
        an_engine_stops(deployment)
        replaced_under_load(deployment)


def many_requests(deployment):
    """200 requests over both, each answered as the model alone would answer."""
    expected = [greedy(text) for text in TEXTS]

    def ask(number):
        answer = deployment.ask(TEXTS[number % len(TEXTS)], logprobs=0).json()
        return answer["id"].split("-")[1], answer["choices"][0]["logprobs"]["tokens"]

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(200)))
    for number, (_, tokens) in enumerate(answers):
        assert tokens == expected[number % len(TEXTS)]
    counts = Counter(replica for replica, _ in answers)
    assert set(counts) == set(deployment.replicas())
    assert min(counts.values()) >= 10


@cache
def model_and_tokenizer():
    return tiny.load_model().eval(), load_tokenizer("tiny")


@torch.inference_mode()
def greedy(text, new=8):
    """Labels of the most likely tokens, each from reading the whole text anew."""
    model, tokenizer = model_and_tokenizer()
    ids = tokenizer(text)["input_ids"]
    for _ in range(new):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return [tokenizer.decode([token]) for token in ids[-new:]]


def a_conversation_stays(deployment):
    """By how it begins, or by its session; a later turn does not read the first one again."""
    client = openai.OpenAI(base_url=f"{deployment.url}/v1", api_key=KEY)
    homes = set()
    for number in range(6):
        ask = f"Number {number}: " + " ".join(TEXTS[:6])
        messages = [{"role": "user", "content": ask}]
        turns = []
        for _ in range(3):
            answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6)
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            messages.append({"role": "user", "content": "And then?"})
            turns.append(answer)
        (home,) = {turn.id.split("-")[1] for turn in turns}
        homes.add(home)
        assert turns[2].usage.prompt_tokens_details.cached_tokens > 0
    assert len(homes) == 2
    named = {"extra_headers": {"x-session-id": "mine"}, "model": "tiny", "max_tokens": 1}
    answers = [client.completions.create(prompt=text, **named) for text in TEXTS[:8]]
    assert len({answer.id.split("-")[1] for answer in answers}) == 1


def views_of_all(deployment):
    both = set(deployment.replicas())
    client = deployment.client
    metrics = client.get("/metrics").text
    for replica in both:
        assert f'kvprune:generation_tokens_total{{model="tiny",replica="{replica}"}}' in metrics
    threads = [one["threads"] for one in client.get("/health").json()["replicas"]]
    assert threads == [1, 1]
    report = {"kvprune": {"report": True}}
    for text in TEXTS[:6]:  # wherever it was written
        made = deployment.ask(text, **report).json()["id"]
        assert "<html" in client.get(f"/v1/traces/{made}").text
    assert "<html" in client.get("/").text
    assert is_error(client.get("/nowhere"), 404, code="unknown_url")
    assert is_error(httpx.get(f"{deployment.url}/v1/models"), 401, code="missing_api_key")
    elsewhere = {"Host": "elsewhere.example"}  # with keys any name will do
    assert client.get("/v1/models", headers=elsewhere).status_code == 200


def a_client_that_leaves(deployment):
    """Its rows leave the engine, long before their end."""
    before = deployment.sample("request_success_total", finished_reason="cancelled")
    body = {"prompt": TEXTS[0], "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 3}
    with deployment.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_text())

    def cancelled():
        now = deployment.sample("request_success_total", finished_reason="cancelled")
        return now - before == 3

    until(cancelled, 20)
    until(lambda: not deployment.rows(), 20)


def too_many_requests(deployment):
    """More than both engines hold: some are refused, in OpenAI's words, and none fails."""
    start = threading.Barrier(80)

    def ask(number):
        start.wait()
        return deployment.ask(f"{number}: {TEXTS[number % 20]}", 400)

    with ThreadPoolExecutor(80) as pool:
        answering = pool.map(ask, range(80))
        until(lambda: len({row["replica"] for row in deployment.rows()}) == 2, 60)
        answers = list(answering)
    counts = Counter(answer.status_code for answer in answers)
    assert set(counts) == {200, 429}, counts
    assert counts[200] >= ROWS + WAITING
    for answer in answers:
        if answer.status_code == 429:
            assert is_error(answer, 429, code="rate_limit_exceeded")
            assert int(answer.headers["retry-after"]) > 0
    until(lambda: not deployment.rows(), 60)


def a_replica_is_killed(deployment):
    """Its streams end with an error, the others with their answers; whoever asks again gets one."""
    streams = []
    for text in itertools.islice(itertools.cycle(TEXTS), 12):
        streams.append(Stream(deployment, f"{len(streams)}: {text}", 450))
        assert streams[-1].begun.wait(60)
        if len({stream.replica for stream in streams}) == 2:
            break
    before = deployment.replicas()
    victim = streams[-1].replica
    os.kill(before[victim], signal.SIGKILL)
    for stream in streams:
        stream.join(120)
        assert not stream.is_alive()
        if stream.replica == victim:
            assert stream.events[-1]["error"]["code"] == "replica_lost"
        else:
            assert stream.events[-1] == "[DONE]"
    # the same conversations, at once and elsewhere
    for stream in streams:
        text = stream.body["prompt"]
        answer = deployment.ask(text, logprobs=0).json()
        assert answer["id"].split("-")[1] != victim
        assert answer["choices"][0]["logprobs"]["tokens"] == greedy(text)
    deployment.until_two(without=[victim])


def an_engine_stops(deployment):
    """Its process lives on, but Ray replaces it; until then everyone can see which it is."""
    victim, pid = next(iter(deployment.until_two().items()))
    deployment.stop_engine(pid)
    there = {"x-session-id": f"replica:{victim}"}
    body = {"prompt": TEXTS[0], "max_tokens": 4}
    answer = deployment.client.post("/v1/completions", json=body, headers=there)
    assert is_error(answer, 503)
    assert "told to stop" in answer.text

    def told():
        """The others know from its next report."""
        health = deployment.client.get("/health").json()
        failures = {one["replica"]: one["failure"] for one in health["replicas"]}
        degraded = health["status"] == "degraded"
        return degraded and failures.get(victim) == "MemoryError: told to stop"

    until(told, 10)
    deployment.until_two(without=[victim])


def replaced_under_load(deployment):
    """SIGHUP: each replica makes place for a new one after its last answer; no request is lost."""
    before, done, statuses = deployment.until_two(), threading.Event(), []

    def ask(client):
        for number in itertools.count():
            if done.is_set():
                return
            statuses.append(deployment.ask(f"{client} {number} {TEXTS[number % 20]}").status_code)
            done.wait(0.05)

    streams = [Stream(deployment, text, 400) for text in TEXTS[:3]]
    for stream in streams:
        assert stream.begun.wait(60)
    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(ask, number) for number in range(3)]
        deployment.process.send_signal(signal.SIGHUP)
        until(lambda: len(set(deployment.replicas()) - set(before)) == 2, 2 * REPLACE_SECONDS)
        done.set()
        for client in clients:
            client.result()
    assert set(statuses) == {200}, Counter(statuses)
    assert len(statuses) > 20
    for stream in streams:
        stream.join(60)
        assert stream.events[-1] == "[DONE]"
