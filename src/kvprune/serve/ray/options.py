"""What is said of a deployment: on the command line, in a YAML file, or as a dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter, ValidationError

from kvprune.errors import PruneError
from kvprune.utils.parse import in_bytes


@dataclass(frozen=True)
class RayOptions:
    """The replicas, and the engine in each of them."""

    model: Annotated[str, "a model by name, or a folder that every node has"]
    adapter: Annotated[str | None, "an adapter for it"] = None
    name: Annotated[str | None, "as clients call it"] = None
    beside: Annotated[tuple[str, ...], "other adapters of its base, over the same weights"] = ()
    replicas: Annotated[int, "how many; with max_replicas the fewest"] = 1
    max_replicas: Annotated[int | None, "the most, as the load asks for them"] = None
    cpus: Annotated[float, "cores of a replica, and threads"] = 1.0
    gpus: Annotated[float, "GPUs of a replica"] = 0.0
    sticky: Annotated[bool, "a conversation goes to the replica that has read it"] = True
    threshold: Annotated[float | None, "higher prunes more"] = None
    protect_recent: Annotated[int | None, "latest tokens that are not dropped yet"] = None
    template: Annotated[str | None, "a Jinja file"] = None
    kv: Annotated[Literal["int8"] | None, "keys and values in a byte each"] = None
    kv_budget: Annotated[str | None, "bytes of a replica's caches"] = None
    prefix_budget: Annotated[str | None, "bytes of its kept prefixes"] = None
    snapshots: Annotated[str | None, "a folder or URL where prefixes outlive a replica"] = None
    snapshot_limit: Annotated[str, "bytes there"] = "10GB"
    max_rows: Annotated[int, "answers that a replica writes at once"] = 64
    max_waiting: Annotated[int, "that wait in it; more get status 429"] = 256
    chunk: Annotated[int, "tokens of a step while answers are written"] = 1024
    admission: Annotated[Literal["forecast", "worst", "optimistic"], "how rows enter"] = "forecast"
    dtype: Annotated[str, "auto, float32, bfloat16 or float16"] = "auto"
    device: Annotated[str | None, "cpu, cuda, ..."] = None
    drain: Annotated[float, "seconds for running answers before a replica stops"] = 30.0
    health_seconds: Annotated[float, "between looks at a replica's health"] = 2.0
    report_seconds: Annotated[float, "between two reports of a replica to the others"] = 0.5
    scale_up_seconds: Annotated[float, "that a higher load must last"] = 10.0
    scale_down_seconds: Annotated[float, "that a lower load must last"] = 300.0
    api_keys: Annotated[tuple[str, ...], "that clients must send"] = ()
    local_names: Annotated[tuple[str, ...] | None, "hosts that it answers to; none: any"] = None

    def __post_init__(self) -> None:
        for name in ("replicas", "max_rows", "max_waiting", "chunk"):
            if getattr(self, name) < 1:
                raise PruneError(f"{name}={getattr(self, name)} must be 1 or more")
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise PruneError(
                f"max_replicas={self.max_replicas} is less than replicas={self.replicas}, the "
                f"fewest; raise it, or leave it out for a fixed number"
            )
        if self.cpus <= 0:
            raise PruneError(f"cpus={self.cpus:g} must be more than 0")
        for name in ("kv_budget", "prefix_budget", "snapshot_limit"):
            if (size := getattr(self, name)) is not None:
                in_bytes(size, name)

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus))


def parse_options(arguments: Mapping[str, Any]) -> RayOptions:
    """From `name=value` pairs, whose values may be text."""
    known = [field.name for field in fields(RayOptions)]
    if unknown := sorted(set(arguments) - set(known)):
        raise PruneError(f"{unknown[0]} is no option of a deployment; use {', '.join(known)}")
    if "model" not in arguments:
        raise PruneError("a deployment needs a model; give model=NAME")
    try:
        return TypeAdapter(RayOptions).validate_python(dict(arguments))
    except ValidationError as error:
        first = error.errors()[0]
        own = first.get("ctx", {}).get("error")
        if isinstance(own, PruneError):
            raise own from None
        where = ".".join(str(part) for part in first["loc"])
        text = first["msg"][:1].lower() + first["msg"][1:]
        raise PruneError(f"{where}={first['input']!r}: {text}") from error
