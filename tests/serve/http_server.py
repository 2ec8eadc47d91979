"""The application under test: called directly, or behind a real server on a free port."""

import json
import threading
import time
from contextlib import contextmanager

from starlette.testclient import TestClient

from kvprune.serve.api import create_app
from kvprune.serve.server import Server
from kvprune.serve.sockets import bind


@contextmanager
def calling(engine, **options):
    with TestClient(create_app(engine, **options), raise_server_exceptions=True) as client:
        yield client


@contextmanager
def serving(engine, drain=0.0, **options):
    """Address and server; both are gone afterwards."""
    bound = bind("127.0.0.1", 0)
    server = Server(create_app(engine, **options), drain=drain, log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, name="server")
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(10)
        bound.close()
        assert not thread.is_alive()


def until(condition, seconds=5.0):
    """Wait for something that must come true within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def events(text):
    """The data of server-sent events: parsed, [DONE] as it is."""
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data:")]
    return [part if part == "[DONE]" else json.loads(part) for part in found]


def is_error(response, status, param=None, code=None):
    """Whether it is OpenAI's error with this status; fails with its text otherwise."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    if param is not None:
        assert body["error"]["param"] == param, body
    if code is not None:
        assert body["error"]["code"] == code, body
    return True
