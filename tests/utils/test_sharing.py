"""Groups of processes: threads in their place, then two real ones of which one is killed."""

import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kvprune
from kvprune.cli import app
from kvprune.errors import PruneError
from kvprune.evaluate.points import Points
from kvprune.utils import processes
from kvprune.utils.processes import ALONE, Group, is_main, launched

SRC = Path(kvprune.__file__).parent.parent
KILLED = """
import os, sys
from kvprune.errors import PruneError
from kvprune.utils.processes import launched

def work(item):
    if item == 3:
        os._exit(9)
    return 10 * item

try:
    with launched() as group:
        for result in group.map(range(8), work):
            print(result, flush=True)
except PruneError as error:
    print(error, flush=True)
"""


def run(size, work):
    """What the work returns for the group of each of `size` threads, or the error it ends with."""
    barrier, values = threading.Barrier(size), [None] * size

    def member(rank):
        def exchange(value):
            values[rank] = value
            barrier.wait(10)
            # copies, as between processes
            everyone = pickle.loads(pickle.dumps(values))
            barrier.wait(10)
            return everyone

        try:
            return work(Group(rank, size, exchange))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(member, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 10])
def test_items_are_shared_and_results_are_in_order(size, count):
    done = [[] for _ in range(size)]

    def work(group):
        return list(group.map(range(count), lambda item: done[group.rank].append(item) or -item))

    assert run(size, work) == [[-item for item in range(count)]] * size
    assert done == [list(range(rank, count, size)) for rank in range(size)]


def test_a_failure_ends_all_in_its_round():
    begun = []

    def fail(item):
        begun.append(item)
        if item == 4:
            raise PruneError("item 4 is broken; mend it")
        return item

    ended = run(3, lambda group: list(group.map(range(9), fail)))
    assert sorted(begun) == [0, 1, 2, 3, 4, 5]
    assert [str(error) for error in ended] == [
        "process 1 of 3 failed, so all end: item 4 is broken; mend it",
        "item 4 is broken; mend it",
        "process 1 of 3 failed, so all end: item 4 is broken; mend it",
    ]
    unforeseen = run(2, lambda group: group.from_main(lambda: {}["key"]))
    assert isinstance(unforeseen[0], KeyError)
    assert str(unforeseen[1]) == "process 0 of 2 failed, so all end: 'key'"


def test_work_of_the_main_process_and_of_all():
    assert run(3, lambda group: group.from_main(lambda: group.rank + 5)) == [5, 5, 5]
    assert run(3, lambda group: group.together(lambda: object) is object) == [True] * 3
    assert [group.is_main for group in (ALONE, Group(0, 2), Group(1, 2))] == [True, True, False]


def test_stored_points_are_known_to_all_and_written_by_one(tmp_path):
    """One point is in the file; all measure the others together."""
    file = tmp_path / "points.json"
    Points(file).measure({"n": 1}, lambda: [{"square": 1}])
    writers = []

    def work(group):
        points = Points(file, group=group)
        write = points.write
        points.write = lambda path: writers.append(group.rank) or write(path)
        missing = [n for n in range(4) if {"n": n} not in points]
        squares = group.map(missing, lambda n: n * n)
        for n in range(4):
            points.measure({"n": n}, lambda: [{"square": next(squares)}])
        return missing, points.rows

    want = [{"n": n, "square": n * n} for n in (1, 0, 2, 3)]
    assert run(3, work) == [([0, 2, 3], want)] * 3
    assert writers == [0, 0, 0]
    assert Points(file).rows == want


def test_alone_unless_a_launcher_says_otherwise(monkeypatch):
    with launched() as group:
        assert group is ALONE
    # what some clusters set without starting any other process
    monkeypatch.setenv("WORLD_SIZE", "4")
    with launched() as group:
        assert group is ALONE
    monkeypatch.setenv("RANK", "3")
    assert not is_main()
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PruneError, match=r"process 3 of 4 does not reach .*MASTER_ADDR.*torchrun"):
        launched().__enter__()


@pytest.mark.parametrize(
    "args",
    [["explain", "tiny", "a text"], ["eval", "lm-eval"], ["eval", "throughput", "tiny"]],
)
def test_what_is_not_shared_is_refused(monkeypatch, args):
    """Each process would do all of it, and write the same files."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PruneError, match=f"{args[1] if args[0] == 'eval' else 'text'} is for one"):
        CliRunner().invoke(app, args, catch_exceptions=False)


def test_each_process_of_a_machine_has_a_gpu(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    processes._choose_gpu(1)
    assert chosen == [1]
    with pytest.raises(PruneError, match="process 2 of this machine has no GPU: there are 2"):
        processes._choose_gpu(2)


def test_a_killed_process_ends_the_others():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(SRC), "WORLD_SIZE": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # fmt: skip
    processes = [
        subprocess.Popen([sys.executable, "-c", KILLED], env=environment | {"RANK": str(rank)},
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    (said, errors), _ = (process.communicate(timeout=60) for process in processes)
    assert [process.returncode for process in processes] == [0, 9], errors
    *results, last = said.splitlines()
    assert results == ["0", "10"]
    assert last.startswith("process 0 of 2 has lost the others (")
