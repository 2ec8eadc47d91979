"""The server on Ray Serve: `serve run kvprune.serve.ray:build model=smollm2-135m replicas=4`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application

__all__ = ["build"]


def build(arguments: Mapping[str, Any]) -> Application:
    """The application for `serve run` and `serve deploy`; `RayOptions` lists the arguments."""
    # Ray reads its environment when it is imported: what only needs this package's other modules
    # imports it after that is set
    from kvprune.serve.ray.application import from_arguments

    return from_arguments(arguments)
