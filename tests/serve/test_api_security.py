"""Keys, names, disconnects, draining, and a log that tells nothing."""

import logging
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from http_server import calling, events, is_error, serving, until

from kvprune.errors import PruneError
from kvprune.serve.limits import Limits
from kvprune.serve.server import WithoutQuery
from kvprune.serve.sockets import bind

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 300}


def test_keys(engine):
    with calling(engine, keys=("first", "second")) as api:
        paths = [route.path for route in api.app.routes if hasattr(route, "path")]
        paths += ["/openapi.json", "/v1/models", CHAT, "/metrics", "/tokenize", "/nothing"]
        closed = {path for path in paths if path not in ("/", "/health")}
        for path in closed:
            for method in ("GET", "POST", "DELETE", "HEAD"):
                refused = api.request(method, path.replace("{id:path}", "x").replace("{id}", "x"))
                assert refused.status_code == 401, (method, path)
        assert is_error(api.get("/v1/models"), 401, code="missing_api_key")
        for wrong in (
            "Bearer third",
            "Bearer",
            "Bearer first2",
            "first",
            "Basic first",
            "Bearer é",
        ):
            refused = api.get("/v1/models", headers={"Authorization": wrong.encode()})
            assert is_error(refused, 401, code="invalid_api_key")
            assert refused.headers["www-authenticate"] == "Bearer"
            assert "first" not in refused.text
        for key in ("Bearer first", "bearer second"):
            assert api.get("/v1/models", headers={"Authorization": key}).is_success
        assert api.get("/health").is_success
        assert api.get("/").is_success
        assert api.options("/v1/models").status_code == 405


def test_without_keys_only_names_of_this_machine(engine):
    with calling(engine, local_names=["box"]) as api:
        for host in (
            "localhost",
            "127.0.0.1:8000",
            "[::1]:8000",
            "192.168.1.2",
            "box",
            "LOCALHOST",
        ):
            assert api.get("/v1/models", headers={"Host": host}).is_success, host
        for host in ("evil.example", "localhost.evil.example:8000", "127.0.0.1.evil.example"):
            assert is_error(api.get("/v1/models", headers={"Host": host}), 403, code="unknown_host")
    with calling(engine, local_names=["box"], keys=["k"]) as api:
        headers = {"Host": "any.example", "Authorization": "Bearer k"}
        assert api.get("/v1/models", headers=headers).is_success


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row_within_a_second(engine, url, stream):
    engine.delay = 0.02
    with httpx.Client() as client:
        timeout = httpx.Timeout(5, read=0.2)
        body = {**LONG, "prompt": ["abc", "de"], "stream": stream}
        if stream:
            with client.stream("POST", url + PLAIN, json=body) as answer:
                next(answer.iter_text())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(url + PLAIN, json=body, timeout=timeout)
    left = time.monotonic()
    until(lambda: not engine.running)
    assert time.monotonic() - left < 1
    assert len(engine.cancelled) == 2
    # and the next one is served
    assert httpx.post(url + PLAIN, json={"prompt": "abc", "max_tokens": 2}).is_success


def test_many_cancelled_then_one_served(engine, url):
    engine.delay = 0.01

    def give_up(_):
        with httpx.Client() as client, pytest.raises(httpx.ReadTimeout):
            client.post(url + PLAIN, json=LONG, timeout=httpx.Timeout(5, read=0.1))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(give_up, range(16)))
    until(lambda: not engine.running)
    answer = httpx.post(url + PLAIN, json={"prompt": "abc", "max_tokens": 3})
    assert answer.json()["choices"][0]["text"] == "abc"


def test_draining(engine):
    """Running requests finish, new ones get 503, then the server stops."""
    engine.delay = 0.01
    body = {"prompt": "abc", "max_tokens": 60}
    with serving(engine, drain=10) as (url, server), ThreadPoolExecutor(2) as pool:
        running = pool.submit(httpx.post, url + PLAIN, json=body)
        until(lambda: engine.running)
        server.handle_exit(signal.SIGTERM, None)
        refused = httpx.post(url + PLAIN, json=body)
        assert is_error(refused, 503, code="stopping")
        assert refused.headers["retry-after"]
        assert is_error(httpx.get(url + "/health"), 503, code="stopping")
        assert len(running.result(10).json()["choices"][0]["text"]) == 60
        until(lambda: server.should_exit)


def test_what_takes_longer_than_the_drain_is_told(engine):
    engine.delay = 0.05
    body = {**LONG, "stream": True}
    with serving(engine, drain=0.3) as (url, server), ThreadPoolExecutor(2) as pool:
        running = pool.submit(httpx.post, url + PLAIN, json=body)
        view = pool.submit(httpx.get, url + "/v1/kv", timeout=10)
        until(lambda: engine.running)
        server.handle_exit(signal.SIGTERM, None)
        assert events(running.result(10).text)[-1]["error"]["code"] == "stopping"
        assert view.result(10).status_code == 200
    until(lambda: not engine.running)


def test_a_second_signal_stops_at_once(engine):
    engine.delay = 0.05
    with serving(engine, drain=60) as (url, server), ThreadPoolExecutor(1) as pool:
        running = pool.submit(httpx.post, url + PLAIN, json={**LONG, "stream": True})
        until(lambda: engine.running)
        server.handle_exit(signal.SIGINT, None)
        assert not server.should_exit
        server.handle_exit(signal.SIGINT, None)
        assert server.should_exit
        assert running.exception(10) is None or isinstance(running.exception(), httpx.HTTPError)
    until(lambda: not engine.running)


def test_the_body_must_come_in_time(engine):
    with serving(engine, limits=Limits(body_seconds=0.2)) as (url, _):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            head = f"POST {PLAIN} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in connection.recv(4096).split(b"\r\n")[0]


def test_the_log_has_no_query():
    args = ("1.2.3.4:5", "GET", "/v1/kv?key=secret", "1.1", 200)
    text = '%s - "%s %s HTTP/%s" %d'
    record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, text, args, None)
    assert WithoutQuery().filter(record)
    assert record.getMessage() == '1.2.3.4:5 - "GET /v1/kv HTTP/1.1" 200'


def test_prompts_and_keys_are_not_logged(engine, caplog):
    caplog.set_level(logging.DEBUG)
    with serving(engine, keys=["my key"]) as (url, _):
        headers = {"Authorization": "Bearer my key"}
        for stream in (True, False):
            body = {"prompt": "my prompt", "max_tokens": 2, "stream": stream}
            assert httpx.post(url + PLAIN, json=body, headers=headers).is_success
        httpx.post(url + PLAIN, json={"prompt": ["my prompt", 3]}, headers=headers)
        httpx.post(url + PLAIN, json={"prompt": "my prompt"}, headers={"Authorization": "my key"})
    logged = [record.getMessage() for record in caplog.records if "httpx" not in record.name]
    assert not any("my prompt" in text or "my key" in text for text in logged)


def test_ports_and_hosts():
    taken = bind("127.0.0.1", 0)
    taken.listen()
    try:
        with pytest.raises(PruneError, match="another program uses this port"):
            bind("127.0.0.1", taken.getsockname()[1])
    finally:
        taken.close()
    with pytest.raises(PruneError, match=r"no-such-host.invalid is no address"):
        bind("no-such-host.invalid", 0)
    with pytest.raises(PruneError, match="give another --host"):
        bind("203.0.113.1", 0)


def test_nothing_is_left_of_a_server(engine):
    before = threading.active_count()
    with serving(engine) as (url, _):
        assert httpx.get(url + "/health").is_success
    assert threading.active_count() <= before + 1
