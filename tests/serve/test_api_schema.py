"""Whatever the schema allows, and much that it does not: never a status of 500 or more."""

import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, settings

from kvprune.serve.api import create_app

schemathesis = pytest.importorskip("schemathesis", reason="a development dependency")

engine = FakeEngine()
schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(engine))
# the live view never ends
schema = schema.exclude(path="/v1/kv")


@pytest.fixture(scope="module", autouse=True)
def running():
    engine.start()
    yield
    engine.stop()


@schema.parametrize()
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_no_server_error(case):
    answer = case.call()
    assert answer.status_code < 500, (case.as_curl_command(), answer.text)
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
