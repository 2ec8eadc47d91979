"""Requests that wait for what a folder of snapshots has of their prompt, before they begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvprune.serve.choice import kind_of
from kvprune.serve.prefixes import SHORTEST
from kvprune.serve.request import Request
from kvprune.serve.snapshot_folder import Origin

if TYPE_CHECKING:
    from kvprune.cache.snapshot import Snapshot
    from kvprune.serve.choice import Sink
    from kvprune.serve.prefixes import Prefixes
    from kvprune.serve.runner import Runner
    from kvprune.serve.shelf import Shelf

Begin = Callable[[Request, "Sink", bool, "Snapshot | None"], None]
Post = Callable[[Callable[[], None]], None]


class Arrivals:
    """All methods are for the engine's thread, which `post` has a call made by."""

    def __init__(self, runner: Runner, prefixes: Prefixes, shelf: Shelf | None, post: Post):
        self._runner, self._prefixes, self.shelf, self._post = runner, prefixes, shelf, post
        self.looking: dict[str, tuple[Request, Sink, bool]] = {}

    @property
    def waiting(self) -> int:
        """Choices."""
        return sum(request.n for request, _, _ in self.looking.values())

    def come(self, request: Request, sink: Sink, pins: bool, begin: Begin) -> None:
        """Begin a request, at once or when it is known what the shelf has of its prompt."""
        if not self._look(request, sink, pins, begin):
            begin(request, sink, pins, None)

    def leave(self, id: str) -> tuple[Request, Sink] | None:
        """A request that still waits is not wanted any more; None if it does not."""
        waited = self.looking.pop(id, None)
        return None if waited is None else waited[:2]

    def keep(self, tokens: list[int], request: Request, snapshot: Snapshot) -> None:
        """What the engine keeps goes to the shelf, too."""
        if self.shelf is not None and len(tokens) >= SHORTEST:
            self.shelf.write(tokens, self._origin(request), snapshot)

    def counted(self) -> dict[str, int]:
        return {} if self.shelf is None else self.shelf.counted()

    def _look(self, request: Request, sink: Sink, pins: bool, begin: Begin) -> bool:
        if self.shelf is None or request.prompt_logprobs is not None:
            return False
        known = self._prefixes.longest(request.prompt, (kind_of(request), request.salt))
        if len(request.prompt) - known <= SHORTEST:
            return False
        self.looking[request.id] = request, sink, pins

        def found(snapshot: Snapshot | None) -> None:
            if (waited := self.looking.pop(request.id, None)) is not None:
                fits = snapshot is not None and self._runner.fits(kind_of(request), snapshot)
                begin(*waited, snapshot if fits else None)

        asked = self.shelf.look(
            request.prompt, self._origin(request), known, lambda it: self._post(lambda: found(it))
        )
        if not asked:
            del self.looking[request.id]
        return asked

    def _origin(self, request: Request) -> Origin:
        kind = kind_of(request)
        return Origin(self._runner.fingerprint(kind), request.salt, kind.recorded)
