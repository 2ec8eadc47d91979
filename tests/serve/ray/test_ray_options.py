"""What is said of a deployment, and what Ray is told of it."""

import pytest

from kvprune.cli.replicas import parse_replicas, share_of_cores
from kvprune.errors import PruneError
from kvprune.serve.ray import build
from kvprune.serve.ray.application import deployment
from kvprune.serve.ray.options import RayOptions, parse_options


def test_text_becomes_values():
    """`serve run` gives text, YAML gives values."""
    text = {"model": "tiny", "replicas": "3", "cpus": "0.5", "sticky": "false", "kv": "int8"}
    values = {"model": "tiny", "replicas": 3, "cpus": 0.5, "sticky": False, "kv": "int8"}
    assert parse_options(text) == parse_options(values) == RayOptions(**values)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"replica": 2}, "replica is no option of a deployment; use model, adapter"),
        ({"replicas": "many"}, "replicas='many': input should be a valid integer"),
        ({"replicas": 0}, "replicas=0 must be 1 or more"),
        ({"replicas": 4, "max_replicas": 2}, "max_replicas=2 is less than replicas=4"),
        ({"cpus": 0}, "cpus=0 must be more than 0"),
        ({"kv": "int3"}, "kv='int3'"),
        ({"kv_budget": "much"}, "kv_budget 'much' must be a size"),
    ],
)
def test_what_is_wrong_is_named(wrong, words):
    with pytest.raises(PruneError) as error:
        parse_options({"model": "tiny", **wrong})
    assert str(error.value).startswith(words)


def test_a_model_is_needed():
    with pytest.raises(PruneError, match="give model=NAME"):
        parse_options({"replicas": 2})


def test_ray_refuses_nothing():
    """Every request reaches an engine, whose refusals have OpenAI's shape."""
    told = deployment(RayOptions("tiny", max_rows=8, max_waiting=16))
    assert told["max_queued_requests"] == -1
    assert told["max_ongoing_requests"] > 8 + 16
    assert told["graceful_shutdown_timeout_s"] == 30


def test_fixed_or_as_the_load_asks():
    fixed = deployment(RayOptions("tiny", replicas=3))
    assert fixed["num_replicas"] == 3
    assert "autoscaling_config" not in fixed
    scaled = deployment(RayOptions("tiny", replicas=2, max_replicas=9, scale_up_seconds=4))
    assert "num_replicas" not in scaled
    config = scaled["autoscaling_config"]
    assert (config["min_replicas"], config["max_replicas"]) == (2, 9)
    assert config["upscale_delay_s"] == 4
    assert config["policy"]["policy_function"].endswith(":by_rows_and_bytes")


def test_built_for_ray(monkeypatch):
    """All that Ray checks of a deployment, and keys from where no list of processes shows them."""
    monkeypatch.setenv("KVPRUNE_API_KEY", "first second")
    made = build({"model": "tiny", "replicas": "2", "api_keys": ["second", "third"]})
    replicas = made._bound_deployment
    assert (replicas.name, replicas.num_replicas) == ("kvprune", 2)
    assert replicas.ray_actor_options["num_cpus"] == 1
    options = replicas.init_args[0]
    assert options.api_keys == ("second", "third", "first")
    build({"model": "tiny", "replicas": 1, "max_replicas": 4})


def test_replicas_on_the_command_line():
    assert parse_replicas("4") == (4, None)
    assert parse_replicas("2:8") == (2, 8)
    for wrong in ("0", "some", "4:2", "1:", ":3", "2:8:9"):
        with pytest.raises(PruneError, match="--replicas"):
            parse_replicas(wrong)


def test_shares_of_the_cores(monkeypatch):
    monkeypatch.setattr("kvprune.cli.replicas.machine_cores", lambda: 8)
    assert share_of_cores(2, None) == 4
    assert share_of_cores(3, None) == 2
    assert share_of_cores(16, None) == 0.5
    assert share_of_cores(2, 1.5) == 1.5
    with pytest.raises(PruneError, match=r"3 replicas of 4 cores each need more than the 8"):
        share_of_cores(3, 4)
