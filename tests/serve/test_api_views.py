"""Models, tokens, health, metrics, the live view, prefixes, traces and the page."""

import json

import httpx
from http_server import calling, is_error, serving, until
from prometheus_client.parser import text_string_to_metric_families

from kvprune.serve.clock import Clock
from kvprune.serve.limits import Limits
from kvprune.serve.request import Event, RowStatus, Status, Token
from kvprune.version import __version__


def test_models(api):
    listed = api.get("/v1/models").json()
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", 400)
    assert api.get("/v1/models/fake").json() == model


def test_model_names_may_have_slashes(engine):
    engine.name = "owner/model"
    with calling(engine) as api:
        assert api.get("/v1/models/owner/model").json()["id"] == "owner/model"


def test_several_models(engine):
    engine.others = ("b", "dense")
    with calling(engine) as api:
        listed = api.get("/v1/models").json()["data"]
        assert [model["id"] for model in listed] == ["fake", "b", "dense"]
        assert api.get("/v1/models/dense").json() == listed[2]
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        bodies = {"/v1/completions": {"prompt": "hi"}, "/v1/chat/completions": chat}
        for path, body in bodies.items():
            for asked, served in ((None, "fake"), ("b", "b"), ("dense", "dense")):
                answer = api.post(path, json={**body, "model": asked, "max_tokens": 2}).json()
                assert (answer["model"], engine.requests[-1].model) == (served, served)
            wrong = api.post(path, json={**body, "model": "c"})
            assert is_error(wrong, 404, "model", "model_not_found")
            assert "'fake', 'b', 'dense'" in wrong.json()["error"]["message"]
        api.post("/v1/prefixes", json={"prompt": "hello", "model": "dense"})
        assert engine.pinned["prefix-0"]["model"] == "dense"
        assert is_error(api.post("/v1/prefixes", json={"prompt": "hi", "model": "c"}), 404)
        found = values(api)
    assert found["kvprune:time_to_first_token_seconds_count", "b"] == 2
    assert found["kvprune:request_prompt_tokens_count", "dense"] == 2
    assert {key[1] for key in found if key[0] == "kvprune:num_requests_running"} == {
        "fake", "b", "dense"
    }  # fmt: skip
    assert found["kvprune:info", "dense", __version__] == 1


def test_tokens(api, engine):
    found = api.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert found["count"] == 3
    assert found["token_strs"] == ["a", r"bytes:\xc3", r"bytes:\xa9"]
    assert api.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "aé"}
    messages = [{"role": "user", "content": "hi"}]
    chat = api.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert engine.tokenizer.decode(chat) == "<user>hi</user><assistant>"
    bare = {"messages": messages, "add_generation_prompt": False}
    chat = api.post("/tokenize", json=bare).json()["tokens"]
    assert engine.tokenizer.decode(chat) == "<user>hi</user>"
    assert is_error(api.post("/tokenize", json={}), 400)
    assert is_error(api.post("/tokenize", json={"messages": []}), 400, "messages")
    assert is_error(api.post("/detokenize", json={"tokens": [999]}), 400, "tokens")
    info = api.get("/tokenizer_info").json()
    assert info["eos_token"] == "<end>"
    assert info["chat_template"] == engine.tokenizer.chat_template


def test_small_answers(api):
    assert api.get("/health").json() == {"status": "ok"}
    assert api.head("/health").is_success
    assert api.get("/version").json() == {"version": __version__}
    page = api.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<title>" in page.text


def values(api):
    found = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            found[key] = sample.value
    return found


def test_metrics(api):
    before = values(api)
    api.post("/v1/completions", json={"prompt": ["abc", "de"], "max_tokens": 3, "n": 2})
    api.get("/nothing")
    after = values(api)
    grown = {key: after[key] - before.get(key, 0) for key in after}
    assert grown["kvprune:time_to_first_token_seconds_count", "fake"] == 2
    assert grown["kvprune:e2e_request_latency_seconds_count", "fake"] == 2
    assert grown["kvprune:inter_token_latency_seconds_count", "fake"] == 2 * 2 * 2
    assert grown["kvprune:request_generation_tokens_sum", "fake"] == 12
    assert grown["kvprune:request_prompt_tokens_sum", "fake"] == 5
    assert grown["kvprune:http_responses_total", "404"] == 1
    assert after["kvprune:kv_bytes_budget",] == 1000
    assert after["kvprune:snapshots_bytes",] == 50
    assert after["kvprune:num_preemptions_total", "fake"] == 1
    assert after["kvprune:prefix_cache_hits_total", "fake"] == 3
    assert after["kvprune:tokens_dropped_total", "1"] == 4
    assert after["kvprune:kv_slots_live", "0"] == 2
    assert after["kvprune:info", "fake", __version__] == 1


class Notes:
    def __init__(self):
        self.seen = []

    def observe(self, name, value, model):
        self.seen.append((name.removesuffix("_seconds"), value))


def test_times():
    """Submitted at 1, a step from 3 to 5 in which it is admitted, tokens at 5 and 8, over at 9."""
    notes, now, watchers = Notes(), [0.0], []

    def watch(sink):
        watchers.append(sink)
        return lambda: watchers.remove(sink)

    def status(state):
        return Status(0, (RowStatus("a", 0, state, 1, 1, 1.0, 1),), 0, 0, 0, ())

    clock = Clock(notes, watch, lambda: now[0])
    now[0] = 1.0
    clock.submitted("a")
    now[0] = 3.0
    watchers[0](status("waiting"))
    now[0] = 5.0
    clock.see_events("a", [Event(0, tokens=(Token(1),))])
    watchers[0](status("running"))
    assert not watchers  # nobody waits any more
    now[0] = 8.0
    clock.see_events("a", [Event(0, text="x"), Event(0, tokens=(Token(1),))])
    now[0] = 9.0
    clock.finished("a", True)
    assert notes.seen == [
        ("time_to_first_token", 4.0), ("inter_token_latency", 3.0), ("e2e_request_latency", 8.0),
        ("request_generation_tokens", 2), ("request_queue_time", 2.0),
        ("request_prefill_time", 2.0), ("request_decode_time", 4.0),
    ]  # fmt: skip
    clock.submitted("b")
    clock.finished("b", False)
    assert (len(notes.seen), watchers) == (7, [])


def test_requests(engine, url):
    engine.delay = 0.05
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 50, "stream": True}
    ) as answer:
        pieces = answer.iter_text()
        next(pieces)
        [row] = httpx.get(f"{url}/v1/requests").json()["data"]
        assert (row["request"], row["state"]) == (answer.headers["x-request-id"], "running")
    until(lambda: httpx.get(f"{url}/v1/requests").json()["data"] == [])


def test_the_live_view(engine):
    engine.delay = 0.02
    with serving(engine, limits=Limits(viewers=1)) as (url, server):
        with httpx.stream("GET", f"{url}/v1/kv") as view:
            lines = (line for line in view.iter_lines() if line)
            first = json.loads(next(lines).removeprefix("data: "))
            assert (first["budget"], first["rows"]) == (1000, [])
            assert is_error(httpx.get(f"{url}/v1/kv"), 429)
            httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 8, "n": 2})
            later = json.loads(next(lines).removeprefix("data: "))
            assert [row["index"] for row in later["rows"]] == [0, 1]
            assert later["counters"]["dropped_by_layer"] == [3, 4]
        until(lambda: server._service.viewers == 0)
        assert not engine._watchers


def test_prefixes(api):
    pinned = api.post("/v1/prefixes", json={"prompt": "a long text"}).json()
    assert (pinned["tokens"], pinned["pinned"], pinned["object"]) == (11, True, "prefix")
    messages = [{"role": "system", "content": "hi"}]
    other = api.post("/v1/prefixes", json={"messages": messages}).json()
    assert other["tokens"] == len("<system>hi</system>")
    listed = api.get("/v1/prefixes").json()["data"]
    assert [found["id"] for found in listed] == [pinned["id"], other["id"]]
    assert api.delete(f"/v1/prefixes/{pinned['id']}").json()["deleted"]
    assert is_error(api.delete(f"/v1/prefixes/{pinned['id']}"), 404)
    assert is_error(api.post("/v1/prefixes", json={}), 400)
    assert is_error(api.post("/v1/prefixes", json={"prompt": ""}), 400)
    assert is_error(api.post("/v1/prefixes", json={"prompt": "a" * 500}), 400)


def test_a_prefix_without_room(api, engine):
    engine.prefixes = list
    assert is_error(api.post("/v1/prefixes", json={"prompt": "a"}), 400, "prompt")


def test_traces(api, engine):
    engine.pages["chatcmpl-1"] = "<html>what was forgotten</html>"
    found = api.get("/v1/traces/chatcmpl-1")
    assert found.headers["content-type"].startswith("text/html")
    assert "forgotten" in found.text
    assert is_error(api.get("/v1/traces/other"), 404, "id")
