"""What the API needs of an engine, as a type: `kvprune.serve.engine.Engine`, or a test's double."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvprune.serve.request import Event, Request, Settings, Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Sink = Callable[[list[Event]], None]


class ServingEngine(Protocol):
    """Sinks are called from the engine's thread, in order; every method may be called from any."""

    @property
    def name(self) -> str: ...
    @property
    def models(self) -> Sequence[str]: ...  # all names that are served; `name` is the first
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def positions(self) -> int: ...  # prompt and answer may not have more tokens
    @property
    def vocabulary(self) -> int: ...
    @property
    def alive(self) -> bool: ...
    @property
    def failure(self) -> str: ...  # why it is not alive
    @property
    def ready(self) -> bool: ...

    def submit(self, request: Request, sink: Sink) -> None: ...
    def cancel(self, id: str) -> None: ...
    def status(self) -> Status: ...
    def watch(self, sink: Callable[[Status], None]) -> Callable[[], None]: ...
    def trace_page(self, id: str) -> str | None: ...
    def pin(
        self, prompt: tuple[int, ...], settings: Settings, salt: str, sink: Sink, model: str = ""
    ) -> Any: ...
    def prefixes(self) -> list[dict[str, Any]]: ...
    def unpin(self, id: str) -> bool: ...
