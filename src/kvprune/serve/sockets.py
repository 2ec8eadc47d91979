"""The address that a server listens at."""

from __future__ import annotations

import errno
import socket

from kvprune.errors import PruneError


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address, before a model is loaded: that takes seconds."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError) as error:
        raise PruneError(
            f"--host {host} is no address of this machine: {error}; 127.0.0.1 is reached from this "
            f"machine alone, 0.0.0.0 from everywhere"
        ) from error
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise PruneError(f"cannot serve at {host} port {port}: {_remedy(error)}") from error
    return bound


def _remedy(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "another program uses this port; stop it, or give another --port (0: any free one)"
    if error.errno == errno.EACCES:
        return "ports below 1024 need special rights; give a higher --port"
    return f"{error.strerror}; give another --host"
