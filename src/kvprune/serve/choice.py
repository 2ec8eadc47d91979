"""Choice: one row of a request, with its sampler, its text and its way to the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvprune.serve.detokeniser import Detokeniser, Stops
from kvprune.serve.request import Event, Finish, Request, RequestError, Token, Usage
from kvprune.serve.runner import Kind, ServedRow
from kvprune.serve.sampling import Sampler

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Sink = Callable[[list[Event]], None]


def kind_of(request: Request) -> Kind:
    return Kind(request.settings, request.report, request.model)


class Choice(ServedRow):
    """One of the `n` answers to a request. The first reads the prompt, the others go on from it."""

    def __init__(
        self,
        request: Request,
        index: int,
        sink: Sink,
        tokenizer: PreTrainedTokenizerBase,
        at_once: bool = False,
    ):
        stops_at = tuple(sorted({n for n in request.boundaries if 0 < n < len(request.prompt)}))
        super().__init__(
            list(request.prompt), request.max_tokens, () if at_once else stops_at, at_once
        )
        self.request, self.index, self.sink = request, index, sink
        self.kind = kind_of(request)
        self.model = request.model
        self.all_logits = request.prompt_logprobs is not None
        self.sampler = Sampler(request.sampling, request.prompt, index)
        self.pins = False  # whether its prompt is kept as a prefix, for good
        self.parked = 0  # bytes of its snapshot while it is preempted
        self.cached = 0  # tokens of the prompt that were not read again
        self.prompt_logs: list[Token] = []
        self.noted = 0  # tokens of the prompt after the first that have been in it
        self.dropped: Tensor | None = None  # (L, tokens), what the client knows to be dropped
        self._text = Detokeniser(tokenizer, request.prompt)
        self._stops = Stops(request.stop, request.include_stop)

    @property
    def new(self) -> int:
        """Tokens of the answer."""
        return len(self.tokens) - self.prompt

    @property
    def prefix_kind(self) -> tuple[Kind, str]:
        return self.kind, self.request.salt

    def banned(self, ends: frozenset[int]) -> frozenset[int]:
        """Tokens that it must not choose yet."""
        return ends if self.new < self.request.min_tokens else frozenset()

    def take(self, token: Token, ends: frozenset[int]) -> Event:
        """A token was chosen: the news of it, with `finish` if it was the last."""
        request = self.request
        if token.id in ends and not request.ignore_eos:
            self.tokens.append(token.id)
            text = self._stops.end()
            return self.event(text, (token,), "stop", stop_reason=token.id)
        self.tokens.append(token.id)
        self.sampler.note(token.id)
        may_stop = self.new >= request.min_tokens
        text, stop = self._stops.add(self._text.add(token.id), may_stop)
        finish: Finish | None = None
        if stop is not None:
            finish = "stop"
        elif self.new >= request.max_tokens:
            finish = "length"
            rest, stop = self._stops.add(self._text.end(), may_stop)
            text += rest
            if stop is None:
                text += self._stops.end()
            else:
                finish = "stop"
        return self.event(text, (token,), finish, stop_reason=stop)

    def event(
        self,
        text: str = "",
        tokens: tuple[Token, ...] = (),
        finish: Finish | None = None,
        stop_reason: str | int | None = None,
        error: RequestError | None = None,
    ) -> Event:
        prompt = None
        if self.prompt_logs and (tokens or finish):
            prompt, self.prompt_logs = tuple(self.prompt_logs), []
        usage = Usage(self.prompt, self.new, self.cached) if finish else None
        return Event(
            self.index,
            text,
            tokens,
            prompt=prompt,
            finish=finish,
            stop_reason=stop_reason,
            usage=usage,
            error=error,
        )
