"""What one replica of several tells of all of them, without Ray."""

import json
from dataclasses import replace

import httpx
import pytest
from http_server import calling, serving, until
from prometheus_client.parser import text_string_to_metric_families

from helpers import in_own_loop
from kvprune.serve.fleet import STALE_SECONDS, Report, state_of
from kvprune.serve.limits import Limits
from kvprune.serve.metrics import Metrics
from kvprune.serve.ray.board import FORGET_SECONDS, Board
from kvprune.serve.request import RowStatus, Status

READ = {"prompt_tokens": 3}


def status(name, rows, bytes_=10, kept=(3, 4), **counters):
    made = tuple(RowStatus(f"{name}{i}", 0, "running", 9, 8, 5.5, 4) for i in range(rows))
    return Status(7, made, bytes_, 100, 1, kept, {"steps": 7, "forecast_error": 0.5, **counters})


class Engine:
    """As much of one as metrics read."""

    name, models, alive, failure = "model", ("model",), True, ""

    def __init__(self, found):
        self.found = found

    def status(self):
        return self.found


def report(name, found, **more):
    metrics = Metrics(Engine(found))
    metrics.observe("request_prompt_tokens", 5)
    metrics.answered(200)
    return Report(name, True, "", 1, 1, state_of(found), metrics.families(), **more)


class Fleet:
    replica = "aaaa1111"

    def __init__(self, *reports):
        self.found = list(reports)

    async def reports(self, metrics=False):
        return [r if metrics else replace(r, metrics=()) for r in self.found]


@pytest.fixture
def fleet():
    return Fleet(
        report("aaaa1111", status("a", 2, dropped_by_layer=(1, 2), by_model={"model": READ})),
        report("bbbb2222", status("b", 1, 30, (), dropped_by_layer=(), by_model={"model": READ})),
        report("cccc3333", status("c", 5), age=STALE_SECONDS + 1),
    )


def test_rows_of_all_that_live(engine, fleet):
    with calling(engine, fleet=fleet) as api:
        rows = api.get("/v1/requests").json()["data"]
    assert [(row["request"], row["replica"]) for row in rows] == [
        ("a0", "aaaa1111"), ("a1", "aaaa1111"), ("b0", "bbbb2222"),
    ]  # fmt: skip


def test_one_state_of_all(engine, fleet):
    with serving(engine, fleet=fleet, limits=Limits(view_seconds=0.1)) as (url, _):
        lines = httpx.get(f"{url}/v1/kv").text  # ends by itself: a replica that stops waits for it
    state = json.loads(lines.split("\n\n")[0].removeprefix("data: "))
    assert (state["bytes"], state["budget"], state["prefix_bytes"], state["step"]) == (
        40, 200, 2, 14,
    )  # fmt: skip
    assert state["kept_by_layer"] == [3, 4]
    by_model = {"model": {"prompt_tokens": 6}}
    counters = {"steps": 14, "dropped_by_layer": [1, 2], "by_model": by_model}
    assert state["counters"] == counters
    assert len(state["rows"]) == 3


def test_samples_of_all_with_their_names(engine, fleet):
    with calling(engine, fleet=fleet) as api:
        text = api.get("/metrics").text
        alone = parsed(api.app.state.service.metrics.text().decode())
    families = parsed(text)
    assert set(families) == set(alone)
    used = families["kvprune:kv_bytes_used"].samples
    assert {s.labels["replica"]: s.value for s in used} == {"aaaa1111": 10, "bbbb2222": 30}
    layers = families["kvprune:kv_slots_live"].samples
    assert {(s.labels["replica"], s.labels["layer"]): s.value for s in layers} == {
        ("aaaa1111", "0"): 3, ("aaaa1111", "1"): 4,
    }  # fmt: skip
    sizes = families["kvprune:request_prompt_tokens"]
    assert sizes.type == "histogram"
    buckets = [s for s in sizes.samples if s.name.endswith("_bucket")]
    assert {s.labels["replica"] for s in buckets} == {"aaaa1111", "bbbb2222"}


def parsed(text):
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_health_names_who_is_well(engine, fleet):
    with calling(engine, fleet=fleet) as api:
        answer = api.get("/health")
        assert answer.status_code == 200
        assert answer.json()["status"] == "degraded"
        well = {one["replica"]: one["alive"] for one in answer.json()["replicas"]}
        assert well == {"aaaa1111": True, "bbbb2222": True, "cccc3333": False}
        fleet.found.pop()
        assert api.get("/health").json()["status"] == "ok"
        fleet.found[0] = replace(fleet.found[0], alive=False, failure="out of memory")
        assert api.get("/health").json()["replicas"][0]["failure"] == "out of memory"
        fleet.found.pop()
        assert api.get("/health").status_code == 503


def test_ids_name_the_replica(engine, fleet):
    with calling(engine, fleet=fleet) as api:
        made = api.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()["id"]
    assert made.startswith("cmpl-aaaa1111-")


def test_a_view_ends_with_the_server(engine, fleet):
    with serving(engine, fleet=fleet) as (url, server):
        with httpx.stream("GET", f"{url}/v1/kv", timeout=20) as view:
            lines = view.iter_lines()
            assert next(lines)
            server.should_exit = True
            list(lines)
        until(lambda: not server.started or server.should_exit)


def test_the_board():
    now = 0.0
    board = Board(lambda: now)

    def reports(**options):
        return in_own_loop(board.reports(**options))

    in_own_loop(board.put(report("b", status("b", 1))))
    now = 2.0
    in_own_loop(board.put(report("a", status("a", 1))))
    now = 3.0
    assert [(r.replica, r.age, r.metrics) for r in reports()] == [("a", 1.0, ()), ("b", 3.0, ())]
    assert all(r.metrics for r in reports(metrics=True))
    in_own_loop(board.put(report("b", status("b", 4))))
    assert [(r.replica, r.age, len(r.state["rows"])) for r in reports()][1] == ("b", 0.0, 4)
    in_own_loop(board.leave("b"))
    assert [r.replica for r in reports()] == ["a"]
    now = 2.0 + FORGET_SECONDS
    assert reports() == []
