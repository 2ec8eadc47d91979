"""A Ray of our own on this machine, for as long as one command runs."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvprune.errors import PruneError
from kvprune.serve.ray.options import RayOptions

APPLICATION = "kvprune"
# of the store that processes share; requests and answers do not go through it
STORE_BYTES = 80 * 10**6
ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "kvprune.serve.ray.front:middlewares",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's own name for: never to be reached from other machines. Its ports, of which each lets
    # others run any code, are then bound to the loopback address
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


@contextmanager
def running(
    options: RayOptions, host: str, port: int, cores: float, log_level: str = "info"
) -> Iterator[None]:
    """The deployment at an address, from when it answers; at the end no process is left."""
    _set_environment()
    import ray
    from ray import serve

    # the paths of its sockets may have 107 characters, which $TMPDIR can exceed
    folder = tempfile.mkdtemp(prefix="kvprune-ray-", dir="/tmp")
    level = _level(log_level)
    logging.getLogger("ray.serve").setLevel(level)
    try:
        ray.init(
            address="local",
            num_cpus=cores,  # type: ignore[arg-type]
            num_gpus=_gpus(options),
            include_dashboard=False,
            object_store_memory=STORE_BYTES,
            logging_level=level,
            log_to_driver=log_level in ("debug", "info"),
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        serve.start(
            proxy_location="HeadOnly",
            http_options={"host": host, "port": port},
            logging_config={"log_level": level, "enable_access_log": log_level == "debug"},
        )
        deploy(options, level)
        yield
    finally:
        ray.shutdown()  # and with it Serve, which has nothing left to do
        shutil.rmtree(folder, ignore_errors=True)


def deploy(options: RayOptions, level: int = logging.WARNING) -> None:
    """Start it, or replace what runs: replica by replica, each after its last answer."""
    from ray import serve

    from kvprune.serve.ray.application import application

    try:
        serve.run(
            application(options), name=APPLICATION, route_prefix="/",
            logging_config={"log_level": level},
        )  # fmt: skip
    except RuntimeError as error:
        text = str(error).strip()
        ours = [line for line in text.splitlines() if "PruneError: " in line]
        reason = ours[-1].partition("PruneError: ")[2] if ours else text
        raise PruneError(f"the replicas cannot start: {reason}") from error


def until_stopped(renew: Callable[[], None]) -> None:
    """Until SIGINT or SIGTERM, and until the running answers are over; a second one ends them.

    SIGHUP renews: every replica loads its files anew, one after the other.
    """
    from ray import serve

    signals, news = list[int](), threading.Event()

    def handle(number: int, frame: object) -> None:
        if number != signal.SIGHUP and any(other != signal.SIGHUP for other in signals):
            raise KeyboardInterrupt
        signals.append(number)
        news.set()

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        while not signals or signals[-1] == signal.SIGHUP:
            if news.wait(0.5):
                news.clear()
                if signals[-1] == signal.SIGHUP:
                    _try(renew)
        serve.delete(APPLICATION)
    except KeyboardInterrupt:
        return
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _try(renew: Callable[[], None]) -> None:
    """What ran goes on if the new replicas cannot start."""
    try:
        renew()
    except PruneError as error:
        print(f"kvprune: {error}", file=sys.stderr)


def _set_environment() -> None:
    """Of this process, from which Ray's inherit it; Ray reads it when it is imported."""
    if "ray" in sys.modules:
        raise PruneError("Ray was imported before: start the replicas in a process of their own")
    os.environ.update(ENVIRONMENT)
    if "RAY_AUTH_MODE" not in os.environ:
        # other users of this machine can reach the loopback address too
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _gpus(options: RayOptions) -> int | None:
    return int(options.gpus * (options.max_replicas or options.replicas)) or None


def _level(name: str) -> int:
    """Of Ray's talk about itself, of which there is much: warnings, unless all is wanted."""
    level = int(logging.getLevelName(name.upper()))
    return level if level == logging.DEBUG else max(logging.WARNING, level)
