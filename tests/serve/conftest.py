import logging
import threading

import pytest
from fake_engine import FakeEngine
from http_server import calling, serving


@pytest.fixture
def engine():
    """A fake one that runs; none of our threads is left behind."""
    engine = FakeEngine()
    engine.start()
    yield engine
    engine.stop()
    assert not {"server", "fake-engine"} & {thread.name for thread in threading.enumerate()}


@pytest.fixture
def api(engine):
    """A client of the application, without a network."""
    with calling(engine) as client:
        yield client


@pytest.fixture
def url(engine):
    """The address of a real server."""
    with serving(engine) as (address, _):
        yield address


@pytest.fixture
def said():
    """The warnings of the server, as a list; one that ran before may have silenced its log."""
    log, words = logging.getLogger("kvprune.serve"), []
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: words.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    yield words
    log.setLevel(level)
    log.removeHandler(handler)
