"""How many replicas the load asks for."""

from types import SimpleNamespace

import pytest

from kvprune.serve.ray.scaling import TARGET, by_rows_and_bytes


def wanted(rows, bytes_, current=None, target=1):
    metrics = {"rows": dict(enumerate(rows)), "bytes": dict(enumerate(bytes_))} if rows else None
    context = SimpleNamespace(
        aggregated_metrics=metrics,
        current_num_replicas=len(rows) if current is None else current,
        target_num_replicas=target,
    )
    number, state = by_rows_and_bytes(context)
    assert state == {}
    return number


def test_the_scarcer_of_rows_and_bytes():
    assert wanted([TARGET, TARGET], [0.1, 0.1]) == pytest.approx(2)
    assert wanted([0.1, 0.1], [TARGET, TARGET]) == pytest.approx(2)
    assert wanted([0.2, 0.9], [0.5, 0.1]) == pytest.approx((0.5 + 0.9) / TARGET)


def test_rows_that_wait_ask_for_more_than_there_are():
    assert wanted([3.0], [1.0]) == pytest.approx(3 / TARGET)


def test_idle_replicas_are_not_needed_but_one():
    assert wanted([0.0] * 5, [0.0] * 5) == 1


def test_those_that_start_count_as_busy_as_the_others():
    assert wanted([0.7, 0.7], [0, 0], current=4) == pytest.approx(4 * 0.7 / TARGET)


def test_nothing_known_yet_changes_nothing():
    assert wanted([], [], current=3, target=3) == 3
