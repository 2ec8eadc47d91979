"""Conversations that outlive their engine, and folders that fail, hang or lie."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from engines import GREEDY, alone, prompt, pruned_model
from test_engine import Waiting, wait_until

import kvprune.serve.shelf as shelf_module
from kvprune.serve.engine import Engine
from kvprune.serve.request import Request
from kvprune.serve.seal import Seal
from kvprune.serve.shelf import Shelf
from kvprune.serve.snapshot_folder import SnapshotFolder

SECRET = "0123456789abcdef" * 2
MUCH = 10**9
FIRST = Request("first", prompt(40, 1), 8, GREEDY)


def started(folder, **options):
    engine = Engine(pruned_model(), name="m", budget="1MB", snapshots=folder, **options)
    engine.start()
    return engine


@pytest.fixture
def engine(request, tmp_path):
    """Over a folder that a test may replace."""
    engine = started(SnapshotFolder(str(tmp_path), MUCH))
    yield engine
    engine.stop()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("kvprune-snapshot")]


def ask(engine, request):
    """Its tokens, and how many of its prompt were not read again."""
    sink = Waiting()
    engine.submit(request, sink)
    tokens = sink.result()
    return tokens, sink.events[-1].usage.cached_tokens


def follow_up(tokens, id="second", **options):
    return replace(FIRST, id=id, prompt=(*FIRST.prompt, *tokens, *prompt(5, 2)), **options)


def written(engine):
    """Wait until all that it kept is in the folder."""
    wait_until(lambda: engine._shelf._unwritten == 0)


CHILD = f"""
import sys, time
sys.path[:0] = {sys.path!r}
from test_shelf import *
engine = started(SnapshotFolder(sys.argv[1], MUCH, SECRET))
tokens, _ = ask(engine, FIRST)
written(engine)
print(*tokens, flush=True)
time.sleep(600)
"""


def test_a_conversation_outlives_its_engine(tmp_path):
    """The first process is killed; the second reads what is new, and says the same."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True,
        env=os.environ,
    )  # fmt: skip
    try:
        tokens = [int(token) for token in child.stdout.readline().split()]
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert tokens == alone(pruned_model(), FIRST)
    second = follow_up(tokens)
    engine = started(SnapshotFolder(str(tmp_path), MUCH, SECRET))
    other = started(SnapshotFolder(str(tmp_path), MUCH, SECRET[::-1]))
    try:
        want = alone(engine.pruned, second)
        # all but the last token of the answer, which nobody has read
        assert ask(engine, second) == (want, len(FIRST.prompt) + len(tokens) - 1)
        assert ask(engine, replace(second, id="s", salt="x")) == (want, 0)
        assert ask(other, second) == (want, 0)
        counted = engine._shelf.counted()
        assert (counted["stored_hits"], counted["stored_queries"]) == (1, 2)
        assert engine._core.counters["prefix_hits"] == 1
    finally:
        engine.stop()
        other.stop()


def test_what_memory_has_is_not_read_from_the_folder(engine):
    tokens, _ = ask(engine, FIRST)
    assert ask(engine, follow_up(tokens))[1] == len(FIRST.prompt) + len(tokens) - 1
    assert engine._shelf.counted()["stored_hits"] == 0


@pytest.mark.parametrize("kept", ["0", "1MB"], ids=["no room", "room"])
def test_memory_need_not_have_room(tmp_path, kept):
    folder = SnapshotFolder(str(tmp_path), MUCH)
    engines = [started(folder, prefix_budget=kept) for _ in range(2)]
    try:
        tokens, _ = ask(engines[0], FIRST)
        written(engines[0])
        second = follow_up(tokens)
        want = alone(engines[1].pruned, second)
        assert ask(engines[1], second) == (want, len(FIRST.prompt) + len(tokens) - 1)
        assert len(engines[1].prefixes()) == (0 if kept == "0" else 2)
    finally:
        for engine in engines:
            engine.stop()


class Failing:
    url = "far://away"

    def find(self, *_):
        raise ConnectionError("no route to host")

    put = find


def test_a_folder_that_cannot_be_reached(engine, said):
    engine._shelf.folder = Failing()
    tokens, _ = ask(engine, FIRST)
    assert tokens == alone(engine.pruned, FIRST)
    second = follow_up(tokens, salt="none in memory")
    assert ask(engine, second)[0] == alone(engine.pruned, second)
    written(engine)
    assert engine._shelf.counted()["stored_failures"] >= 3
    assert said == ["cannot use far://away: ConnectionError: no route to host"]


class Hanging:
    url = "far://away"

    def __init__(self):
        self.go_on, self.asked = threading.Event(), 0

    def find(self, *_):
        self.asked += 1
        self.go_on.wait(60)

    def put(self, *_):
        return False


def test_a_folder_that_hangs_delays_few(engine, said):
    folder = engine._shelf.folder = Hanging()
    engine._shelf.patience = 0.2
    start = time.monotonic()
    for number in range(8):
        request = replace(FIRST, id=f"{number}", salt=f"{number}", max_tokens=1)
        assert ask(engine, request)[1] == 0
    assert time.monotonic() - start > 0.4
    assert folder.asked == shelf_module.READERS
    assert "does not answer" in said[0]
    folder.go_on.set()
    wait_until(lambda: engine._shelf._late == 0)
    ask(engine, replace(FIRST, id="again", salt="again"))
    assert folder.asked == shelf_module.READERS + 1


def test_cancelled_and_stopped_while_it_is_looked_for(engine):
    folder = engine._shelf.folder = Hanging()
    sinks = [Waiting(2), Waiting()]
    engine.submit(replace(FIRST, id="gone", n=2), sinks[0])
    engine.submit(replace(FIRST, id="cut", salt="x"), sinks[1])
    wait_until(lambda: len(engine._core.arrivals.looking) == 2)
    engine.cancel("gone")
    assert sinks[0].done.wait(5)
    assert [event.finish for event in sinks[0].events] == ["cancelled", "cancelled"]
    assert engine._core.waiting == 1
    threading.Timer(0.2, folder.go_on.set).start()
    engine.stop()
    assert sinks[1].done.wait(5)
    assert sinks[1].events[-1].error.status == 503
    assert engine.status().rows == ()


def test_a_stop_with_time_lets_them_begin(engine):
    folder = engine._shelf.folder = Hanging()
    sink = Waiting()
    engine.submit(FIRST, sink)
    wait_until(lambda: len(engine._core.arrivals.looking) == 1)
    threading.Timer(0.2, folder.go_on.set).start()
    engine.stop(30.0)
    assert sink.result() == alone(engine.pruned, FIRST)


def test_a_snapshot_that_lies(engine, tmp_path):
    """Whoever can write to a folder without a key may crash nothing."""
    tokens, _ = ask(engine, FIRST)
    written(engine)
    second = follow_up(tokens)
    want = alone(engine.pruned, second)
    folder = engine._shelf.folder
    (file,) = (f for f in tmp_path.rglob("*-*") if f.name.startswith(f"{len(FIRST.prompt) + 7}-"))
    name = "/".join(file.parts[-2:])
    from kvprune import Snapshot

    honest = Snapshot.from_bytes(folder.seal.open(name, file.read_bytes()))
    *rest, last = honest.layers
    lies = [
        replace(honest, layers=tuple(rest)),
        replace(honest, layers=(*rest, {**last, "keys": last["keys"][:, :1]})),
        replace(honest, layers=(*rest, {**last, "keys": last["keys"].half()})),
        replace(honest, layers=(*rest, {**last, "token": last["token"][:1]})),
        replace(honest, layers=(*rest, {k: v for k, v in last.items() if k != "values"})),
        replace(honest, tokens=3),
        replace(honest, layers=(*rest, {**last, "token": last["token"].sum()})),
    ]
    for number, lie in enumerate(lies):
        file.write_bytes(Seal().close(name, lie.to_bytes()))
        other = started(SnapshotFolder(str(tmp_path), MUCH))
        try:
            assert ask(other, replace(second, id=f"{number}")) == (want, 0)
        finally:
            other.stop()


def test_a_rush_is_not_written(monkeypatch, tmp_path):
    monkeypatch.setattr(shelf_module, "WAITING_BYTES", 0)
    engine = started(SnapshotFolder(str(tmp_path), MUCH))
    try:
        ask(engine, FIRST)
        assert engine._shelf.counted()["stored_left_out"] == 1
        assert not list(tmp_path.iterdir())
    finally:
        engine.stop()


def test_whoever_comes_too_late_is_not_heard():
    heard = []
    folder = Hanging()
    shelf = Shelf(folder, patience=0.05)
    assert shelf.look(FIRST.prompt, None, 0, heard.append)
    wait_until(lambda: heard == [None])
    folder.go_on.set()
    wait_until(lambda: shelf._late == 0)
    assert heard == [None]
    shelf.close()
