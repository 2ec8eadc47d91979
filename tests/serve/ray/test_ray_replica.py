"""What Ray asks of a replica; the rest is seen from outside, in test_replicas.py."""

import asyncio
import os
from types import SimpleNamespace

import pytest

from helpers import in_own_loop
from kvprune.errors import PruneError
from kvprune.serve.ray.options import RayOptions
from kvprune.serve.ray.replica import Replica, use_cores
from kvprune.serve.request import RowStatus, Status


class Half(Replica):
    """One without a model, a board or Ray."""

    def __init__(self, engine, board=None):
        self.replica, self._options = "aaaa1111", RayOptions("tiny", max_rows=8)
        self._engine, self._board = engine, board
        metrics = SimpleNamespace(families=lambda: ("families",))
        service = SimpleNamespace(metrics=metrics)
        self._app = SimpleNamespace(state=SimpleNamespace(service=service))

    def __del__(self):
        pass


def engine(rows=0, **more):
    made = tuple(RowStatus(str(i), 0, "running", 1, 1, 1.0, 1) for i in range(rows))
    status = Status(1, made, 30, 120, 0, (), {})
    return SimpleNamespace(status=lambda: status, **{"alive": True, "failure": "", **more})


def test_an_engine_that_has_stopped_makes_it_unhealthy():
    Half(engine()).check_health()
    with pytest.raises(PruneError, match="the engine has stopped: out of memory"):
        Half(engine(alive=False, failure="out of memory")).check_health()


def test_shares_that_decide_on_the_number_of_replicas():
    assert Half(engine(rows=2)).record_autoscaling_stats() == {"rows": 0.25, "bytes": 0.25}
    assert Half(engine(rows=16)).record_autoscaling_stats()["rows"] == 2


def test_without_the_board_it_speaks_of_itself():
    class Broken:
        reports = SimpleNamespace(remote=lambda metrics: asyncio.sleep(0, result=1 / 0))

    (own,) = in_own_loop(Half(engine(rows=1), Broken()).reports())
    assert (own.replica, own.pid, own.metrics) == ("aaaa1111", os.getpid(), ())
    assert len(own.state["rows"]) == 1


def test_its_own_report_is_of_now():
    old = in_own_loop(Half(engine(rows=9), None).reports())
    other = [SimpleNamespace(replica="bbbb2222")]

    async def remembered(metrics):
        return [*old, *other]

    board = SimpleNamespace(reports=SimpleNamespace(remote=remembered))
    own, *others = in_own_loop(Half(engine(rows=1), board).reports(metrics=True))
    assert others == other
    assert (len(own.state["rows"]), own.metrics) == (1, ("families",))


def test_threads_are_its_cores(monkeypatch):
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, "7")
    use_cores(RayOptions("tiny", cpus=3.5).threads)
    assert os.environ["OMP_NUM_THREADS"] == os.environ["NUMBA_NUM_THREADS"] == "3"
    assert RayOptions("tiny", cpus=0.5).threads == 1
