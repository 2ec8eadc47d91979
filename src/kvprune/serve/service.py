"""What the routes of one server share: its engine, limits, prompts, and the requests under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from uuid import uuid4

from kvprune.serve.clock import Clock
from kvprune.serve.fleet import Fleet
from kvprune.serve.limits import Limits
from kvprune.serve.metrics import Metrics
from kvprune.serve.prompts import Prompt, Prompts
from kvprune.serve.request import RequestError, unknown_model
from kvprune.serve.seam import ServingEngine
from kvprune.serve.streams import Answer, dead
from kvprune.serve.token_texts import TokenTexts


class Service:
    def __init__(self, engine: ServingEngine, limits: Limits, fleet: Fleet | None = None):
        self.engine, self.limits, self.fleet = engine, limits, fleet
        self.created = int(time.time())
        self.metrics = Metrics(engine)
        self.clock = Clock(self.metrics, engine.watch)
        self.texts = TokenTexts(engine.tokenizer)
        self.prompts = Prompts(engine.tokenizer, engine.name, engine.vocabulary)
        self.draining = False  # no new requests
        self.closed = False
        self.viewers = 0
        self.answers: set[Answer] = set()  # that are not over
        self._closing: set[asyncio.Event] = set()

    def open(self) -> None:
        self.draining = self.closed = False

    def close(self) -> None:
        """End every answer and every view: the server stops."""
        self.draining = self.closed = True
        for answer in self.answers:
            answer.fail(RequestError("the server is stopping", status=503, code="stopping"))
        for event in self._closing:
            event.set()

    def new_id(self, kind: str) -> str:
        """Of an answer; it names the replica, where its trace will be looked for."""
        replica = f"{self.fleet.replica}-" if self.fleet is not None else ""
        return f"{kind}-{replica}{uuid4().hex}"

    def wake_at_close(self, event: asyncio.Event) -> Callable[[], None]:
        """Set an event when the server stops; returns what forgets it."""
        self._closing.add(event)
        return lambda: self._closing.discard(event)

    def check_ready(self) -> None:
        """Refuse while nothing can be answered, with the reason."""
        if not self.engine.alive:
            raise dead(self.engine)
        if self.draining:
            raise RequestError("the server is stopping", status=503, code="stopping")
        if not self.engine.ready:
            raise RequestError("the model is still loading", status=503, code="loading")

    def check_model(self, model: str | None) -> str:
        """The name of the model that is meant: as given, or the first."""
        if model is not None and model not in self.engine.models:
            raise unknown_model(model, self.engine.models)
        return model or self.engine.name

    def new_tokens(self, prompt: Prompt, wanted: int | None, default: int | None) -> int:
        """How many to generate; None for `default`: as many as fit."""
        size, positions = len(prompt.tokens), self.engine.positions
        if not size:
            raise RequestError("the prompt has no tokens; give it a text", param="prompt")
        left = positions - size
        if wanted is None:
            wanted = max(1, left if default is None else min(default, left))
        if wanted > left:
            raise RequestError(
                f"this model's maximum context length is {positions:,} tokens, but the request "
                f"has {size + wanted:,}: {size:,} of the prompt and {wanted:,} to generate; "
                f"shorten the prompt or lower max_tokens",
                code="context_length_exceeded",
                param="prompt" if size > positions else "max_tokens",
            )
        return wanted
