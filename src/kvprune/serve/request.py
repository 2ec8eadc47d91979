"""What a client asks of the engine, and what it gets back: plain values, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

# "stop": by the model, or a stop string; "length": a limit; "cancelled": by the client
Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 1.0  # 0: the most likely one
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class Settings:
    """What a request changes of the model's pruning; rows with the same settings share a batch."""

    threshold: float | None = None
    protect_recent: int | None = None


@dataclass(frozen=True)
class Request:
    """One prompt and how to go on from it, `n` times."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int  # new ones; 0 reads the prompt only
    sampling: Sampling = Sampling()
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # whether the stop string is part of the text
    min_tokens: int = 0  # before which neither the end token nor a stop string ends
    ignore_eos: bool = False
    logprobs: int | None = None  # of each new token and so many alternatives; None: none
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    report: bool = False  # whether to tell what is dropped
    settings: Settings = Settings()
    # prompt lengths after which a later request may go on: the end of a system message, and so on
    boundaries: tuple[int, ...] = ()
    salt: str = ""  # prefixes are shared among requests with the same salt only
    model: str = ""  # one of those that are served; "": the first


@dataclass(frozen=True)
class Token:
    """A token with its log-probability, from the raw logits; None for the first of a prompt."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the most likely ones, best first


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt, that were not read again


@dataclass(frozen=True)
class Drops:
    """What one step of one choice dropped, if `report` was asked for; at its end, sizes alone."""

    step: int  # tokens that the row has read after it
    dropped: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """(layer, ((position, position of the token that dropped it), ...)), layers with any only"""
    kept: tuple[int, ...]  # tokens that each layer holds after it
    bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Event:
    """News of one choice. A choice has any number of events; the last has `finish`."""

    index: int  # of the choice, 0 to n - 1
    text: str = ""  # new text, that no stop string can still take back
    tokens: tuple[Token, ...] = ()  # new tokens; logprobs if asked for
    prompt: tuple[Token, ...] | None = None  # once, if prompt_logprobs were asked for
    drops: Drops | None = None
    finish: Finish | None = None
    stop_reason: str | int | None = None  # the stop string or end token that ended it
    usage: Usage | None = None  # with `finish`
    error: RequestError | None = None  # with finish="error"


class RequestError(Exception):
    """Why the engine cannot serve a request, as an HTTP status and OpenAI's fields."""

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ):
        super().__init__(message)
        self.message, self.status, self.code, self.param = message, status, code, param


def unknown_model(model: str, known: Iterable[str]) -> RequestError:
    """OpenAI's answer to a name that is not served."""
    return RequestError(
        f"the model {model[:100]!r} does not exist here; this server has "
        f"{', '.join(repr(name) for name in known)}",
        status=404,
        code="model_not_found",
        param="model",
    )


@dataclass(frozen=True)
class RowStatus:
    """One row of the engine, for the live view."""

    request: str
    index: int
    state: Literal["running", "waiting", "preempted"]
    tokens: int  # of prompt and answer so far
    read: int  # of them
    kept: float  # per layer, mean
    bytes: int
    model: str = ""


@dataclass(frozen=True)
class Status:
    """The engine after a step; `counters` only ever grow."""

    step: int
    rows: tuple[RowStatus, ...]
    bytes: int  # that the caches take
    budget: int
    prefix_bytes: int
    kept_by_layer: tuple[int, ...]  # tokens that each layer holds, all rows
    counters: Mapping[str, Any] = field(default_factory=dict)
