"""Which replica gets a request."""

from collections import Counter
from types import SimpleNamespace

import pytest
from ray.serve.request_router import ReplicaID

from helpers import in_own_loop
from kvprune.serve.ray.router import Affinity


class Loads(dict):
    """Requests under way by replica, as Ray's cache has them."""


def router(loads, slack=4):
    """One that knows these replicas, without the loops and gauges that Ray gives it."""
    made = object.__new__(Affinity)
    ids = {name: ReplicaID(name, deployment_id=None) for name in loads}
    replicas = {ids[name]: SimpleNamespace(replica_id=ids[name]) for name in loads}
    made._deployment_id = None
    made._replicas = replicas
    made._replica_queue_len_cache = Loads({ids[name]: load for name, load in loads.items()})
    made.initialize_state(slack=slack)
    made._rebuild_ring(frozenset(replicas))
    return made


def chosen(made, session=""):
    """Names, as they are asked in turn; a list where the idler of several is taken."""
    request = SimpleNamespace(
        metadata=SimpleNamespace(session_id=session, internal_request_id="x"),
        routing_context=SimpleNamespace(should_backoff=False),
    )
    groups = in_own_loop(made.choose_replicas(list(made._replicas.values()), request))
    assert request.routing_context.should_backoff  # or a full replica is asked without a pause
    return [[replica.replica_id.unique_id for replica in group] for group in groups]


def test_a_session_has_one_replica_and_all_have_some():
    made = router(dict.fromkeys("abcd", 0))
    first = {f"s{i}": chosen(made, f"s{i}")[0] for i in range(200)}
    again = {name: chosen(made, name)[0] for name in first}
    assert first == again
    counts = Counter(name for (name,) in first.values())
    assert set(counts) == set("abcd")
    assert max(counts.values()) < 100


def test_only_sessions_of_the_replica_that_is_gone_move():
    before, after = router(dict.fromkeys("abcd", 0)), router(dict.fromkeys("abc", 0))
    for i in range(100):
        (home,) = chosen(before, f"s{i}")[0]
        (now,) = chosen(after, f"s{i}")[0]
        assert now == home or home == "d"


def test_others_help_a_replica_that_is_far_busier():
    home = chosen(router({"a": 0, "b": 0}), "one")[0]
    other = ["b"] if home == ["a"] else ["a"]
    loads = {home[0]: 5, other[0]: 0}
    assert chosen(router(loads), "one")[0] == home  # 5 <= 1.25 · 2.5 + 4
    loads[home[0]] = 12
    groups = chosen(router(loads), "one")  # 12 > 1.25 · 6 + 4
    assert groups[0] == other
    assert home in groups


def test_all_busy_alike_keeps_everyone_at_home():
    idle, busy = router({"a": 0, "b": 0}), router({"a": 500, "b": 500})
    for i in range(20):
        assert chosen(idle, f"s{i}")[0] == chosen(busy, f"s{i}")[0]


def test_without_a_session_the_idler_of_two():
    made = router(dict.fromkeys("abcd", 0))
    groups = [chosen(made)[0] for _ in range(50)]
    assert all(len(group) == 2 for group in groups)
    assert {name for group in groups for name in group} == set("abcd")
    assert len(chosen(router({"a": 0}))[0]) == 1


@pytest.mark.parametrize("name", ["a", "d"])
def test_a_replica_by_its_name(name):
    made = router(dict.fromkeys("abcd", 900))
    assert chosen(made, f"replica:{name}") == [[name]]


def test_a_replica_that_is_gone_by_its_name():
    assert len(chosen(router(dict.fromkeys("abcd", 0)), "replica:z")[0]) == 2


def test_nothing_to_choose_from_yet():
    assert chosen(router({})) == [[], []]
