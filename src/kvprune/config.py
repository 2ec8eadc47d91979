"""What can be chosen, for pruning and for the baselines. The annotations are the documentation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, ClassVar, Literal

from kvprune.errors import PruneError


@dataclass(frozen=True)
class PruningConfig:
    """The paper's method, Adaptively Sparse Attention."""

    method: ClassVar[str] = "pruning"

    rank: Annotated[int, "width r of the interaction queries and keys"] = 64
    beta: Annotated[float, "initial β; positive keeps every token at the start"] = 2.0
    alpha: Annotated[float, "α of the gate in training until another is set"] = 1.0
    gate: Annotated[
        Literal["alpha", "temperature"],
        "the gate of training: the α-sigmoid, or the plain sigmoid of α·x (temperature 1/α)",
    ] = "alpha"
    depth_tied: Annotated[bool, "a token dropped in one layer is dropped in all later ones"] = False
    protect_first: Annotated[int, "so many first tokens of a row are never dropped"] = 0
    protect_recent: Annotated[int, "votes on the so many last tokens do not count"] = 0
    threshold: Annotated[float, "drop where the score is at most this; higher prunes more"] = 0.0

    def __post_init__(self) -> None:
        _whole(self, "rank", at_least=1)
        _whole(self, "protect_first", at_least=0)
        _whole(self, "protect_recent", at_least=0)
        _finite(self, "beta")
        _finite(self, "threshold")
        _alpha(self.alpha)
        if self.gate not in ("alpha", "temperature"):
            raise PruneError(f"gate={self.gate!r} is unknown; choose 'alpha' or 'temperature'")


@dataclass(frozen=True)
class DenseConfig:
    """No pruning: every token sees all earlier ones."""

    method: ClassVar[str] = "dense"


@dataclass(frozen=True)
class LocalConfig:
    """Baseline: each token sees the last `window` tokens, itself included."""

    method: ClassVar[str] = "local"

    window: Annotated[int, "how many tokens a token sees, itself included"]

    def __post_init__(self) -> None:
        _whole(self, "window", at_least=1)


@dataclass(frozen=True)
class StridedConfig:
    """Baseline: each token sees its own block and the last token of each earlier block."""

    method: ClassVar[str] = "strided"

    stride: Annotated[int, "length of a block"]

    def __post_init__(self) -> None:
        _whole(self, "stride", at_least=1)


@dataclass(frozen=True)
class StreamingConfig:
    """Training-free: the first tokens and a window of the last ones (StreamingLLM).

    Keys stay rotated to their true positions; the original renumbers them.
    """

    method: ClassVar[str] = "streaming"

    budget: Annotated[int, "how many tokens a layer may hold"]
    sinks: Annotated[int, "how many of them are the first of the row"] = 4

    def __post_init__(self) -> None:
        _whole(self, "sinks", at_least=0)
        _whole(self, "budget", at_least=self.sinks + 1)


@dataclass(frozen=True)
class TovaConfig:
    """Training-free: over the budget, the token with the least attention leaves (TOVA)."""

    method: ClassVar[str] = "tova"

    budget: Annotated[int, "how many tokens a layer may hold"]

    def __post_init__(self) -> None:
        _whole(self, "budget", at_least=1)


@dataclass(frozen=True)
class H2OConfig:
    """Training-free: the last tokens, and those with the most attention so far (H2O)."""

    method: ClassVar[str] = "h2o"

    budget: Annotated[int, "how many tokens a layer may hold, half of them the last ones"]

    def __post_init__(self) -> None:
        _whole(self, "budget", at_least=2)


Config = (
    PruningConfig
    | DenseConfig
    | LocalConfig
    | StridedConfig
    | StreamingConfig
    | TovaConfig
    | H2OConfig
)
METHODS: dict[str, type[Any]] = {c.method: c for c in Config.__args__}


def to_dict(config: Config) -> dict[str, Any]:
    return {"method": config.method, **asdict(config)}


def from_dict(values: dict[str, Any]) -> Config:
    values = dict(values)
    method = values.pop("method", None)
    if method not in METHODS:
        raise PruneError(f"method {method!r} is unknown; choose one of {', '.join(METHODS)}")
    known = {field.name for field in fields(METHODS[method])}
    if unknown := sorted(set(values) - known):
        raise PruneError(
            f"{', '.join(unknown)}: no such setting of {METHODS[method].__name__}; it has "
            f"{', '.join(sorted(known)) or 'none'}. A newer kvprune may have written this"
        )
    config: Config = METHODS[method](**values)
    return config


def check_alpha(alpha: float) -> float:
    """The number itself, or an error if it is no α."""
    _alpha(alpha)
    return float(alpha)


def _alpha(alpha: Any) -> None:
    if not isinstance(alpha, int | float) or not alpha >= 1:
        raise PruneError(f"alpha={alpha!r} must be a number from 1 (sigmoid) to inf (step)")


def _whole(config: Any, name: str, at_least: int) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise PruneError(f"{name}={value!r} must be a whole number, {at_least} or more")


def _finite(config: Any, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PruneError(f"{name}={value!r} must be a finite number")
