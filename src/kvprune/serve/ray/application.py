"""The application that Ray Serve runs: replicas of the server, and a board that knows them all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ray import serve
from ray.serve import Application

from kvprune.serve.ray.board import Board
from kvprune.serve.ray.options import RayOptions, parse_options
from kvprune.serve.ray.replica import Replica

# constructor failures before a deployment is given up: a model that cannot be loaded stays so
TRIES = 3
# requests beyond those that a replica writes or lets wait: refusals under way, views, health
SPARE = 256


def from_arguments(arguments: Mapping[str, Any]) -> Application:
    """Keys are also taken from KVPRUNE_API_KEY."""
    options = parse_options(arguments)
    keys = (*options.api_keys, *os.environ.get("KVPRUNE_API_KEY", "").split())
    return application(replace(options, api_keys=tuple(dict.fromkeys(keys))))


def application(options: RayOptions) -> Application:
    board: Any = serve.deployment(
        Board,
        name="board",
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
    )
    ingress: Any = serve.ingress()(Replica)
    replicas: Any = serve.deployment(ingress, **deployment(options))
    made: Application = replicas.bind(options, board.bind())
    return made


def deployment(options: RayOptions) -> dict[str, Any]:
    """What Ray is told of the replicas.

    The engines refuse what is too much for them, with status 429. Ray must not: its queue has no
    limit, and a replica takes more requests than its engine does.
    """
    found: dict[str, Any] = {
        "name": "kvprune",
        "max_ongoing_requests": options.max_rows + options.max_waiting + SPARE,
        "max_queued_requests": -1,
        "ray_actor_options": {"num_cpus": options.cpus, "num_gpus": options.gpus},
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": options.drain,
        "health_check_period_s": options.health_seconds,
        "health_check_timeout_s": 30.0,
        "max_constructor_retry_count": TRIES,
    }
    if options.sticky:
        found["request_router_config"] = {
            "request_router_class": "kvprune.serve.ray.router:Affinity",
            "request_router_kwargs": {"slack": max(1, options.max_rows // 16)},
        }
    if options.max_replicas is None:
        return {**found, "num_replicas": options.replicas}
    scaling = {
        "min_replicas": options.replicas,
        "max_replicas": options.max_replicas,
        "upscale_delay_s": options.scale_up_seconds,
        "downscale_delay_s": options.scale_down_seconds,
        "policy": {"policy_function": "kvprune.serve.ray.scaling:by_rows_and_bytes"},
    }
    return {**found, "autoscaling_config": scaling}
