"""kvprune serve --replicas: how many processes share the load, and how they are started."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.cli.starting import starting
from kvprune.errors import PruneError

if TYPE_CHECKING:
    from kvprune.serve.ray.options import RayOptions


def parse_replicas(text: str) -> tuple[int, int | None]:
    """'4', or '2:8': the fewest and the most."""
    fewest, colon, most = text.partition(":")
    try:
        found = int(fewest), int(most) if colon else None
    except ValueError:
        found = 0, None
    if found[0] < 1 or (found[1] is not None and found[1] < found[0]):
        raise PruneError(
            f"--replicas {text} must be a number such as 4, or the fewest and the most: 2:8"
        )
    return found


def _check_replicas(text: str | None) -> str | None:
    if text is not None:
        parse_replicas(text)
    return text


Replicas = Annotated[
    str | None,
    typer.Option(
        help="Processes with an engine each, on Ray Serve: a number, or 2:8 for as many as the "
        "load asks for.",
        metavar="N",
        show_default="one, without Ray",
        callback=_check_replicas,
    ),
]
Cpus = Annotated[
    float | None,
    typer.Option(help="Cores of each replica.", min=0.01, show_default="an equal part of them"),
]


def ray_options(replicas: str, cpus: float | None, **engine: Any) -> RayOptions:
    """Of a deployment on this machine alone."""
    from kvprune.serve.ray.options import RayOptions

    fewest, most = parse_replicas(replicas)
    gpus = float(str(engine["device"]).startswith("cuda"))
    each = share_of_cores(most or fewest, cpus)
    return RayOptions(replicas=fewest, max_replicas=most, cpus=each, gpus=gpus, **engine)


def share_of_cores(replicas: int, cpus: float | None) -> float:
    """Cores for each replica."""
    cores = machine_cores()
    each = cpus or (cores // replicas if replicas <= cores else cores / replicas)
    if each * replicas > cores + 1e-6:
        raise PruneError(
            f"{replicas} replicas of {each:g} cores each need more than the {cores} of this "
            f"machine; lower --replicas or --cpus"
        )
    return each


def machine_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def serve_replicas(
    options: RayOptions,
    host: str,
    port: int,
    log_level: str,
    banner: Callable[[list[str], str, bool], None],
) -> None:
    """Until a signal; SIGHUP replaces the replicas, one after the other."""
    from kvprune.serve.ray.local import deploy, running, until_stopped

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to replace
    with ExitStack() as stack:
        with starting() as tell:
            tell("starting Ray and the replicas")
            stack.enter_context(running(options, host, port, machine_cores(), log_level))
        most = "" if options.max_replicas is None else f" to {options.max_replicas}"
        number = f"{options.replicas}{most} replicas of {options.cpus:g} cores each"
        banner([f"{options.name} in {number}"], options.name or options.model, False)
        until_stopped(lambda: deploy(options))


def check_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise PruneError("--replicas needs Ray; install it with pip install 'kvprune[ray]'")
