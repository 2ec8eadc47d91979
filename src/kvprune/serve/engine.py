"""The engine: one thread that owns the model, and the ways into it from all others."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvprune.errors import PruneError
from kvprune.integration.host import max_positions
from kvprune.serve.choice import Sink
from kvprune.serve.core import Core
from kvprune.serve.request import (
    Event,
    Request,
    RequestError,
    Settings,
    Status,
    unknown_model,
)
from kvprune.serve.scheduler import Admission
from kvprune.serve.shelf import Shelf
from kvprune.utils.memory import available
from kvprune.utils.parse import in_bytes

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned
    from kvprune.serve.snapshot_folder import SnapshotFolder

log = logging.getLogger(__name__)

# share of the free memory that the caches may take if nobody says how much
DEFAULT_SHARE = 0.4
# positions of a model whose configuration names no limit
NO_LIMIT = 2**31
# seconds between two states that are published while nobody watches every step
PUBLISH = 0.2


class Engine:
    """Serves requests over one model, from `start` to `stop`.

    Several models that share their weights (`load_strengths`) are given by name: a request says
    which one it wants, and the rows of all share passes. What a request gets does not depend on who
    is beside it. All methods may be called from any thread; sinks are called from the engine's.
    """

    def __init__(
        self,
        pruned: Pruned | Mapping[str, Pruned],
        *,
        name: str = "",
        budget: int | str | None = None,
        kv: str | None = None,
        max_rows: int = 64,
        chunk: int = 1024,
        prefix_budget: int | str | None = None,
        admission: Admission = "forecast",
        max_waiting: int = 256,
        snapshots: SnapshotFolder | None = None,
    ):
        """`snapshots`: where prefixes are kept beyond the end of the process."""
        models = pruned if isinstance(pruned, Mapping) else {name or pruned.name: pruned}
        pruned = next(iter(models.values()))
        if pruned.model.training:
            raise PruneError("the model is in training mode; call model.eval() first")
        counts = {"max_rows": max_rows, "chunk": chunk, "max_waiting": max_waiting}
        for option, number in counts.items():
            if number < 1:
                raise PruneError(f"{option}={number} must be 1 or more")
        self.pruned, self.tokenizer = pruned, pruned.tokenizer
        self.models = tuple(models)
        self.name = self.models[0]
        self.budget = _size(budget, "budget", int(DEFAULT_SHARE * available()))
        self.max_waiting = max_waiting
        limit = max_positions(pruned.model)
        self.positions = NO_LIMIT if limit is None else limit
        embeddings: Any = pruned.model.get_input_embeddings()
        self.vocabulary = int(embeddings.weight.shape[0])
        kept = _size(prefix_budget, "prefix_budget", self.budget // 4)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._shelf = None if snapshots is None else Shelf(snapshots)
        self._core = Core(
            models, self.budget, kept, kv, max_rows, chunk, admission, self._shelf,
            self._commands.put,
        )  # fmt: skip
        self.failure = ""
        self.ready = False
        self._coming = 0  # choices that were submitted and that the thread has not seen yet
        self._waiting = 0  # choices that it has seen and that have not begun
        self._lock = threading.Lock()
        self._stopping: float | None = None  # when whoever still runs is cut off
        self._thread: threading.Thread | None = None
        self._watchers: list[Callable[[Status], None]] = []
        self._pins = itertools.count()
        self._published = 0.0
        self._status = self._core.status()

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive() and not self.failure

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvprune-engine", daemon=True)
        self._thread.start()
        self.ready = True

    def stop(self, drain: float = 0.0) -> None:
        """Take no more requests; those that run may finish within `drain` seconds."""
        with self._lock:
            self._stopping = time.monotonic() + drain
        self._commands.put(None)
        if self._thread is not None:
            self._thread.join(drain + 60)
        if self._shelf is not None:
            self._shelf.close()
        self.ready = False

    def submit(self, request: Request, sink: Sink) -> None:
        """Begin a request; `sink` is called with its events, a list per step."""
        self._submit(request, sink)

    def pin(
        self, prompt: tuple[int, ...], settings: Settings, salt: str, sink: Sink, model: str = ""
    ) -> None:
        """Read a prefix and keep it until `unpin`; the sink's last event says how it went."""
        id = f"pin-{next(self._pins)}"
        request = Request(id, prompt, 0, settings=settings, salt=salt, model=model)
        self._submit(request, sink, pins=True)

    def unpin(self, id: str) -> bool:
        """Forget a prefix; False if there is none of this id."""
        found, done = list[bool](), threading.Event()

        def forget() -> None:
            found.append(self._core.prefixes.remove(id))
            done.set()

        self._commands.put(forget)
        done.wait(60)
        return bool(found and found[0])

    def prefixes(self) -> list[dict[str, Any]]:
        return [
            {"id": prefix.id, "tokens": len(prefix.tokens), "bytes": prefix.bytes,
             "pinned": prefix.pinned, "hits": prefix.hits}
            for prefix in self._core.prefixes.all()
        ]  # fmt: skip

    def cancel(self, id: str) -> None:
        """End a request; of one that is not known (any more) nothing happens."""
        self._commands.put(lambda: self._core.end_all(id, "cancelled"))

    def status(self) -> Status:
        return self._status

    def watch(self, sink: Callable[[Status], None]) -> Callable[[], None]:
        """Call `sink` after every step; returns what ends it."""
        self._watchers.append(sink)

        def unwatch() -> None:
            if sink in self._watchers:
                self._watchers.remove(sink)

        return unwatch

    def trace_page(self, id: str) -> str | None:
        """The explain page of one of the last requests with a report."""
        from kvprune.explain.page import render_page
        from kvprune.serve.tracing import trace_of

        found = self._core.traces.get(id)
        if found is None:
            return None
        model, tokens, record = found
        sizes = self._core.runner.token_bytes(model)
        return render_page(trace_of(self._core.models[model], tokens, record, sizes), model)

    def _submit(self, request: Request, sink: Sink, pins: bool = False) -> None:
        self._check(request)
        with self._lock:
            waiting = self._coming + self._waiting
            if waiting + request.n > self.max_waiting:
                raise RequestError(
                    f"{waiting} answers wait already, and no more than {self.max_waiting} may; try "
                    f"again later",
                    status=429,
                    code="rate_limit_exceeded",
                )
            self._coming += request.n
        self._commands.put(lambda: self._begin(request, sink, pins))

    def _begin(self, request: Request, sink: Sink, pins: bool) -> None:
        with self._lock:
            self._coming -= request.n
        if self._stopping is not None or self.failure:
            error = RequestError("the server is shutting down", status=503)
            sink([Event(index, finish="error", error=error) for index in range(request.n)])
            return
        self._core.begin(request, sink, pins)

    def _run(self) -> None:
        words = "the server is shutting down"
        try:
            while self._take_commands():
                self._core.step()
                self._core.send()
                self._publish()
        except BaseException as error:  # the thread's last words
            log.exception("the engine has stopped")
            self.failure = f"{type(error).__name__}: {error}"
            words = f"the engine has stopped: {self.failure}"
        finally:
            with self._lock:
                self._stopping = self._stopping or time.monotonic()
            self._core.fail_all(RequestError(words, status=503))
            self._do_commands(wait=False)
            self._publish(force=True)

    def _take_commands(self) -> bool:
        """Do what other threads have asked for, wait while there is nothing to do; False: stop."""
        self._do_commands(wait=False)
        while not self._core.requests and (self._stopping is None or self._may_begin()):
            self._publish(force=True)
            self._do_commands(wait=True)
        self._waiting = self._core.waiting
        if self._stopping is None:
            return True
        return bool(self._core.requests) and time.monotonic() < self._stopping

    def _may_begin(self) -> bool:
        """Whether the server stops, but requests wait for their snapshots and have time left."""
        return bool(self._core.arrivals.looking) and time.monotonic() < (self._stopping or 0.0)

    def _do_commands(self, wait: bool) -> None:
        """All that there are; `wait`: for the first, up to a second."""
        while True:
            try:
                command = self._commands.get(wait, 1.0)
            except queue.Empty:
                return
            wait = False
            if command is not None:
                command()
                self._core.send()

    def _check(self, request: Request) -> None:
        """Refuse at once what can never be served."""
        if self._stopping is not None or not self.alive:
            why = f"has stopped: {self.failure}" if self.failure else "is shutting down"
            raise RequestError(f"the server {why}", status=503)
        if not request.prompt:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        worst = max(request.prompt)
        if worst >= self.vocabulary or min(request.prompt) < 0:
            raise RequestError(
                f"the prompt has a token {worst}, but the model's tokens are 0 to "
                f"{self.vocabulary - 1}",
                param="prompt",
            )
        total = len(request.prompt) + request.max_tokens
        if total > self.positions:
            raise RequestError(
                f"this model's maximum context length is {self.positions} tokens; {total} were "
                f"asked for ({len(request.prompt)} in the prompt, {request.max_tokens} new ones). "
                f"Shorten the prompt or ask for fewer",
                code="context_length_exceeded",
                param="prompt",
            )
        bad = [token for token in request.sampling.logit_bias if not 0 <= token < self.vocabulary]
        if bad:
            raise RequestError(f"logit_bias names the token {bad[0]}, which the model does not "
                               f"have", param="logit_bias")  # fmt: skip
        model = request.model or self.name
        if model not in self.models:
            raise unknown_model(model, self.models)
        if request.settings != Settings():
            self._core.runner.method(model, request.settings)  # raises if there is no such setting

    def _publish(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and not self._watchers and now - self._published < PUBLISH:
            return
        self._published = now
        self._status = self._core.status()
        for sink in list(self._watchers):
            try:
                sink(self._status)
            except Exception:
                log.exception("a watcher failed")


def _size(size: int | str | None, name: str, default: int) -> int:
    if size is None:
        return default
    return in_bytes(size, name) if isinstance(size, str) else size
