"""Replicas for a load: against an engine simulated step by step, and against least squares."""

import json
import math
import random

import numpy as np
import pytest
from typer.testing import CliRunner

from kvprune import PruneError
from kvprune.cli import app
from kvprune.evaluate.cost.formulas import cache_bytes
from kvprune.evaluate.cost.shape import read_shape
from kvprune.evaluate.cost.sizing import Load, Replica, plan, row_bytes

REPLICA = Replica(read=900.0, fixed=0.04, per_row=0.004, memory=1e9)


class Engine:
    """Reads one waiting prompt if there is one and room, else makes a step, again and again."""

    def __init__(self, replica, load, rows=10**9):
        self.replica, self.load, self.rows = replica, load, rows
        self.now, self.draw = 0.0, random.Random(0)
        self.waiting, self.running = [], []  # arrivals; [arrival, tokens to write, last token]
        self.seconds, self.gaps, self.ends = [], [], []
        self.area = self.full = 0.0  # rows × time, and the time with all rows

    def run(self, until, arrivals):
        """`arrivals(now, there)`: how many have come since it was last asked."""
        while self.now < until:
            self.waiting += [self.now] * arrivals(self.now, len(self.running) + len(self.waiting))
            inside, before = min(len(self.running) + len(self.waiting), self.rows), self.now
            self.work()
            self.area += inside * (self.now - before)
            self.full += (inside == self.rows) * (self.now - before)

    def work(self):
        if self.waiting and len(self.running) < self.rows:
            self.now += self.replica.reading(self.load)
            # of different lengths, or all rows would begin and end together
            more = round(self.draw.expovariate(1 / (self.load.answer - 1)))
            self.running.append([self.waiting.pop(0), more, self.now])
        elif self.running:
            self.now += self.replica.step(len(self.running))
            for row in self.running:
                self.gaps.append(self.now - row[2])
                row[1:] = [row[1] - 1, self.now]
        else:
            self.now += 0.01
        for row in [row for row in self.running if row[1] <= 0]:
            self.running.remove(row)
            self.seconds.append(self.now - row[0])
            self.ends.append(self.now)


def mean(values):
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("rows", [1, 2, 7, 20])
@pytest.mark.parametrize(
    ("prompt", "answer", "reused"), [(500, 60, 0.0), (500, 60, 0.8), (40, 20, 0)]
)
def test_rows_that_always_run(rows, prompt, answer, reused):
    """Each is followed by another as soon as it ends."""
    load = Load(1.0, prompt, answer, reused)
    engine = Engine(REPLICA, load, rows)
    engine.run(3000.0, lambda now, there: rows - there)
    rate = len(engine.ends) / engine.now
    assert rate == pytest.approx(REPLICA.requests_per_second(load, rows), rel=0.03)
    want = REPLICA.seconds_per_request(load, rows)
    assert mean(engine.seconds) == pytest.approx(want, rel=0.03)
    assert mean(engine.gaps) == pytest.approx(REPLICA.seconds_per_token(load, rows), rel=0.03)


@pytest.mark.parametrize(("share", "rows"), [(0.2, 64), (0.5, 64), (0.7, 64), (0.7, 6)])
def test_requests_that_come_at_random(share, rows):
    """Rows, seconds and waiting are those of the engine."""
    load = Load(1.0, 500, 60)
    rate = share * REPLICA.requests_per_second(load, rows)
    draw, times = random.Random(1), [0.0]
    while times[-1] < 9_000:
        times.append(times[-1] + draw.expovariate(rate))
    times.reverse()

    def come(now, there):
        count = 0
        while times[-1] <= now:
            times.pop()
            count += 1
        return count

    engine = Engine(REPLICA, load, rows)
    engine.run(8_000.0, come)
    # as much memory as these rows need
    memory = rows * 10**6
    replica = Replica(REPLICA.read, REPLICA.fixed, REPLICA.per_row, memory)
    found = plan(Load(rate, 500, 60), replica, 10**6, use=share + 1e-9)
    assert (found.replicas, found.rows) == (1, rows)
    assert found.running == pytest.approx(engine.area / engine.now, rel=0.12)
    assert found.request_seconds == pytest.approx(mean(engine.seconds), rel=0.12)
    assert found.token_seconds == pytest.approx(mean(engine.gaps), rel=0.15)
    assert found.waits == pytest.approx(engine.full / engine.now, abs=0.03)


def test_a_plan_is_the_fewest_replicas():
    load = Load(50.0, 1000, 100, 0.25)
    found = plan(load, REPLICA, 10**7, use=0.7)
    assert found.rows == 64
    most = REPLICA.requests_per_second(load, 64)
    assert found.most_requests == most
    assert found.replicas * 0.7 * most >= 50 > (found.replicas - 1) * 0.7 * most
    assert found.requests == pytest.approx(50 / found.replicas)
    # nobody waits, and Little's law holds
    assert found.waits < 1e-6
    assert found.running == pytest.approx(found.requests * found.request_seconds)
    assert found.tokens_read == pytest.approx(found.requests * 750)
    # less memory, fewer rows, more replicas
    tight = plan(load, REPLICA, 10**8)
    assert (tight.rows, tight.replicas > found.replicas) == (10, True)
    alone = plan(Load(0.001, 1000, 100), REPLICA, 10**7)
    assert alone.request_seconds == pytest.approx(1000 / 900 + 99 * 0.044, rel=0.01)
    assert alone.token_seconds == pytest.approx(0.044, rel=0.01)


def test_steps_are_fitted_by_a_line():
    steps = {1: 0.05, 4: 0.07, 16: 0.11, 32: 0.2}
    slope, start = np.polyfit(list(steps), list(steps.values()), 1)
    replica = Replica.measured(100, steps, 1e9)
    assert (replica.per_row, replica.fixed) == pytest.approx((slope, start))
    # noise must not make more rows faster
    assert Replica.measured(100, {1: 0.05, 2: 0.04}, 1e9).per_row == 0


def test_bytes_of_a_row():
    shape, load = read_shape("gpt2"), Load(1.0, 900, 100)
    most = cache_bytes(shape, 1000, 0.8, 1, 64, "most").total
    assert row_bytes(shape, load, 0.8) == pytest.approx(most * 17 / 16, abs=1)
    dense = 1000 * 2 * 12 * 768 * 4
    assert row_bytes(shape, load, 0.0, None) == pytest.approx(dense * 17 / 16, abs=1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Load(0, 1, 1), "is none"),
        (lambda: Load(1, 1, 1, 1.0), "share of the prompt"),
        (lambda: Replica.measured(10, {1: 0.1}, 1), "two numbers of rows"),
        (lambda: plan(Load(1, 1, 1), REPLICA, 10**10), "does not fit into"),
        (lambda: plan(Load(1, 1, 1), REPLICA, 1, use=0), "below 1"),
    ],
)
def test_what_cannot_be_planned_is_said(call, message):
    with pytest.raises(PruneError, match=message):
        call()


def test_command():
    args = ["eval", "sizing", "gpt2", "--requests", "20", "--read", "900", "--steps",
            "1=0.044,11=0.084", "--memory", "2GB", "--prompt", "500"]  # fmt: skip
    done = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    want = plan(Load(20, 500, 200), Replica.measured(900, {1: 0.044, 11: 0.084}, 2e9),
                row_bytes(read_shape("gpt2"), Load(20, 500, 200), 0.8))  # fmt: skip
    assert found["replicas"] == want.replicas
    assert found["running"] == pytest.approx(want.running)
    shown = CliRunner().invoke(app, args, catch_exceptions=False).stdout
    assert f"{want.replicas} " in shown
    with pytest.raises(PruneError, match="seconds by number of rows"):
        CliRunner().invoke(app, [*args, "--steps", "1:2"], catch_exceptions=False)
