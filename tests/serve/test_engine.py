"""The engine's thread: requests from many threads, cancels, limits, failures, the end."""

import threading
import time

import pytest
from engines import GREEDY, alone, prompt, pruned_model

from kvprune import PruneError
from kvprune.serve.engine import Engine
from kvprune.serve.request import Request, RequestError, Sampling, Settings


class Waiting:
    """A sink that can be waited for."""

    def __init__(self, n=1):
        self.events, self.left, self.done = [], n, threading.Event()
        self.begun = threading.Event()

    def __call__(self, events):
        self.events += events
        self.begun.set()
        self.left -= sum(event.finish is not None for event in events)
        if self.left == 0:
            self.done.set()

    def result(self):
        assert self.done.wait(60)
        return [token.id for event in self.events for token in event.tokens]


@pytest.fixture
def engine():
    engine = Engine(pruned_model(), name="m", budget="1MB", chunk=64)
    engine.start()
    yield engine
    engine.stop()
    assert not any(thread.name == "kvprune-engine" for thread in threading.enumerate())


def ask(engine, id, length=20, new=10, **options):
    sink = Waiting(options.get("n", 1))
    options = {"sampling": GREEDY} | options
    request = Request(id, prompt(length, hash(id) % 1000), new, **options)
    engine.submit(request, sink)
    return request, sink


def test_many_threads(engine):
    asked = []

    def client(number):
        asked.append(ask(engine, f"{number}", 5 + 3 * number))

    threads = [threading.Thread(target=client, args=[n]) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [(request, sink.result()) for request, sink in asked]
    for request, tokens in found:
        assert tokens == alone(engine.pruned, request)
    wait_until(lambda: engine.status().rows == () and engine.status().bytes == 0)
    counters = engine.status().counters
    assert counters["requests_length"] == 12
    assert counters["generation_tokens"] == 120


def test_cancel_frees_within_a_second(engine):
    _, sink = ask(engine, "long", new=400)
    assert sink.begun.wait(30)
    start = time.monotonic()
    engine.cancel("long")
    assert sink.done.wait(5)
    assert time.monotonic() - start < 1
    assert sink.events[-1].finish == "cancelled"
    engine.cancel("nobody")
    ask(engine, "next")[1].result()


def test_what_cannot_be_served_is_refused_at_once(engine):
    for options, words in [
        ({"length": 500, "new": 100}, "maximum context length is 512"),
        ({"settings": Settings(threshold=float("nan"))}, "threshold"),
        ({"sampling": Sampling(logit_bias={999: 1.0})}, "999"),
    ]:
        with pytest.raises(RequestError, match=words) as raised:
            ask(engine, "bad", **options)
        assert raised.value.status == 400
    for tokens, words in [((), "empty"), ((5, 101), "101"), ((-1,), "tokens are 0 to 100")]:
        with pytest.raises(RequestError, match=words):
            engine.submit(Request("bad", tokens, 5), Waiting())
    ask(engine, "good")[1].result()


def test_a_full_queue(engine):
    engine.max_waiting = 3
    refused = []
    for number in range(200):
        try:
            ask(engine, f"{number}", new=200)
        except RequestError as error:
            refused.append(error)
    assert {error.status for error in refused} == {429}
    assert "try again later" in refused[0].message
    engine.stop()


def test_stop_lets_them_finish(engine):
    _, sink = ask(engine, "last", new=60)
    assert sink.begun.wait(30)
    stopping = threading.Thread(target=engine.stop, args=[30.0])
    stopping.start()
    wait_until(lambda: engine._stopping is not None)
    with pytest.raises(RequestError, match="shutting down") as raised:
        ask(engine, "late")
    assert raised.value.status == 503
    assert len(sink.result()) == 60
    stopping.join(30)


def test_stop_without_time_ends_them(engine):
    _, sink = ask(engine, "cut", new=400)
    assert sink.begun.wait(30)
    engine.stop()
    assert sink.done.is_set()
    assert sink.events[-1].error.status == 503


def test_a_thread_that_dies_leaves_nobody_waiting(engine, monkeypatch):
    first = ask(engine, "a", new=400)[1]
    assert first.begun.wait(30)

    def fail(*_):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(engine._core.runner, "step", fail)
    assert first.done.wait(30)
    assert first.events[-1].error.status == 503
    wait_until(lambda: not engine.alive)
    assert "out of luck" in engine.failure
    with pytest.raises(RequestError, match="out of luck") as raised:
        ask(engine, "b")
    assert raised.value.status == 503


def test_a_sink_that_fails_harms_nobody_else(engine):
    def broken(events):
        raise ValueError("gone")

    engine.submit(Request("x", prompt(5, 1), 20, GREEDY), broken)
    request, sink = ask(engine, "y")
    assert sink.result() == alone(engine.pruned, request)


def test_watchers_see_every_step(engine):
    seen = []
    unwatch = engine.watch(seen.append)
    ask(engine, "w", new=15)[1].result()
    wait_until(lambda: len(seen) > 15)
    unwatch()
    (row,) = max(seen, key=lambda status: len(status.rows)).rows
    assert (row.request, row.index) == ("w", 0)
    steps = [status.step for status in seen]
    assert steps == sorted(steps)
    assert any(status.rows and status.rows[0].read > 20 for status in seen)
    assert sum(max(seen, key=lambda status: status.bytes).kept_by_layer) > 0


def test_pinned_prefixes(engine):
    text = prompt(40, 1)
    sink = Waiting()
    engine.pin(text, Settings(), "", sink)
    sink.result()
    (pinned,) = engine.prefixes()
    assert (pinned["tokens"], pinned["pinned"]) == (40, True)
    sink = Waiting()
    engine.submit(Request("p", (*text, 7), 3, GREEDY), sink)
    sink.result()
    assert sink.events[-1].usage.cached_tokens == 40
    assert engine.unpin(pinned["id"])
    assert not engine.unpin(pinned["id"])


def test_the_page_of_a_request(engine):
    engine.pruned.tokenizer.convert_ids_to_tokens = lambda ids: [f"w{i}" for i in ids]
    ask(engine, "r", report=True)[1].result()
    page = engine.trace_page("r")
    assert "<html" in page
    assert engine.trace_page("unknown") is None


def test_bad_options():
    pruned = pruned_model()
    with pytest.raises(PruneError, match="max_rows=0 must be 1 or more"):
        Engine(pruned, max_rows=0)
    with pytest.raises(PruneError, match="budget 'much'"):
        Engine(pruned, budget="much")
    pruned.model.train()
    with pytest.raises(PruneError, match="training mode"):
        Engine(pruned)


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
