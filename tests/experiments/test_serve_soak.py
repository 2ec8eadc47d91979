"""A few seconds of the soak: everything that clients do, and nothing is left or wrong."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiments import serve_soak
from experiments.serve_soak import Soak, make_engine, run
from kvprune.serve.api import create_app
from kvprune.serve.server import Server
from kvprune.serve.sockets import bind


@pytest.fixture(scope="module")
def engine():
    engine = make_engine()
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def address(engine):
    bound = bind("127.0.0.1", 0)
    server = Server(create_app(engine), drain=0.0, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    bound.close()
    assert not thread.is_alive()


def soaked(engine, address, seconds):
    soak = Soak(engine, address, seed=1)
    with ThreadPoolExecutor(1) as thread:  # a browser's loop may run in this one
        rows = thread.submit(lambda: asyncio.run(run(soak, seconds))).result(120)
    return soak, rows


def test_a_short_one(engine, address, monkeypatch):
    monkeypatch.setattr(serve_soak, "CLIENTS", 10)
    soak, rows = soaked(engine, address, 5)
    assert soak.wrong == []
    assert soak.counts["status 200"] > 5
    assert rows[-1]["counters"]["generation_tokens"] > 50


def test_it_finds_a_wrong_answer_and_a_row_that_stays(engine, address, monkeypatch):
    soak = Soak(engine, address, seed=2)
    soak.samples = [(engine.tokenizer("Once upon a time").input_ids, 8, "never said")]
    monkeypatch.setattr(serve_soak, "CLOSE", 0.0)
    soak.check_samples()
    assert "never said" in soak.wrong[0]
    monkeypatch.setattr(engine._core, "_parked", 7)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lambda: asyncio.run(soak.quiet())).result(60)
    assert "'parked': 7" in soak.wrong[1]
