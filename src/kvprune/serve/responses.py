"""Answers as OpenAI writes them, whole and in chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvprune.serve.prompts import Prompt
from kvprune.serve.request import Drops, Event, Token
from kvprune.serve.token_texts import TokenTexts
from kvprune.version import __version__

FINGERPRINT = f"kvprune-{__version__}"


@dataclass
class Choice:
    """One answer as far as it has come."""

    index: int
    prompt: Prompt
    text: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    prompt_tokens: tuple[Token, ...] = ()  # with log-probabilities
    drops: list[Drops] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    cached: int = 0
    completion_tokens: int = 0
    started: bool = False  # whether a chunk of it was sent
    offset: int = 0  # characters of the tokens that were written

    def add(self, event: Event) -> None:
        self.text.append(event.text)
        self.tokens += event.tokens
        self.completion_tokens = len(self.tokens)
        if event.prompt is not None:
            self.prompt_tokens = event.prompt
        if event.drops is not None:
            self.drops.append(event.drops)
        if event.finish is not None:
            self.finish, self.stop_reason = event.finish, event.stop_reason
        if event.usage is not None:
            self.completion_tokens = event.usage.completion_tokens
            self.cached = event.usage.cached_tokens


class Format:
    """What chats and completions share; one object per HTTP request."""

    whole_object = chunk_object = ""

    def __init__(
        self, id: str, model: str, created: int, texts: TokenTexts, logprobs: bool, report: bool
    ):
        self.id, self.model, self.created, self.texts = id, model, created, texts
        self.logprobs, self.report = logprobs, report

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer to a request that did not stream."""
        written = []
        for choice in choices:
            one = self._whole_choice(choice)
            one |= {"finish_reason": choice.finish, "stop_reason": choice.stop_reason}
            if self.report:
                one["kvprune"] = self._report(choice)
            written.append(one)
        answer = {**self._head(self.whole_object), "choices": written, "usage": usage(choices)}
        if sizes := kept(choices):
            answer["kvprune"] = sizes
        return answer

    def chunks(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        """What an event adds to a stream; `choice` has it already."""
        parts = self._parts(choice, event)
        about = self._chunk_report(choice, event) if self.report else {}
        if event.finish is not None:
            about |= kept([choice])
        if not parts and about:
            parts = [self._part(choice)]
        choice.started |= bool(parts)
        chunks = [{**self._head(self.chunk_object), "choices": [part]} for part in parts]
        if about:
            chunks[-1]["kvprune"] = about
        return chunks

    def last_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The chunk of the usage, after all choices."""
        return {**self._head(self.chunk_object), "choices": [], "usage": usage(choices)}

    def _chunk_report(self, choice: Choice, event: Event) -> dict[str, Any]:
        about: dict[str, Any] = {}
        if not choice.started:
            about["prompt_tokens"] = self._named(choice.prompt.tokens)
        if event.tokens:
            about["tokens"] = self._named([token.id for token in event.tokens])
        if event.drops is not None:
            about |= {"layers": len(event.drops.kept), "drops": asdict(event.drops)}
        return about

    def _report(self, choice: Choice) -> dict[str, Any]:
        return {
            **kept([choice]),
            "layers": len(choice.drops[-1].kept) if choice.drops else 0,
            "prompt_tokens": self._named(choice.prompt.tokens),
            "tokens": self._named([token.id for token in choice.tokens]),
            "drops": [asdict(drops) for drops in choice.drops],
        }

    def _named(self, tokens: Sequence[int]) -> list[dict[str, Any]]:
        return [{"id": token, "text": self.texts.text(token)} for token in tokens]

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _parts(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        """The `choices` of the chunks of an event, none if it has nothing to say."""
        raise NotImplementedError

    def _part(self, choice: Choice) -> dict[str, Any]:
        """One that says nothing."""
        raise NotImplementedError


class ChatFormat(Format):
    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(choice.text), "refusal": None}
        logprobs = self._logprobs(choice.tokens) if self.logprobs else None
        return {"index": choice.index, "message": message, "logprobs": logprobs}

    def _part(
        self, choice: Choice, delta: Mapping[str, Any] | None = None, finish: str | None = None
    ) -> dict[str, Any]:
        return {
            "index": choice.index,
            "delta": dict(delta or {}),
            "logprobs": None,
            "finish_reason": finish,
        }

    def _parts(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        parts = []
        if not choice.started:
            parts.append(self._part(choice, {"role": "assistant", "content": ""}))
        if event.text or (self.logprobs and event.tokens):
            part = self._part(choice, {"content": event.text})
            if self.logprobs:
                part["logprobs"] = self._logprobs(event.tokens)
            parts.append(part)
        if event.finish is not None:
            end = self._part(choice, finish=event.finish)
            parts.append({**end, "stop_reason": event.stop_reason})
        return parts

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        return {"content": [self._entry(token) for token in tokens], "refusal": None}

    def _entry(self, token: Token) -> dict[str, Any]:
        top = [self._alternative(id, logprob) for id, logprob in token.top]
        return {**self._alternative(token.id, token.logprob or 0.0), "top_logprobs": top}

    def _alternative(self, id: int, logprob: float) -> dict[str, Any]:
        raw = list(self.texts.bytes(id))
        return {"token": self.texts.label(id), "logprob": finite(logprob), "bytes": raw}


class CompletionFormat(Format):
    whole_object = chunk_object = "text_completion"

    def __init__(self, *args: Any, echo: bool = False):
        super().__init__(*args)
        self.echo = echo

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        text = self._echoed(choice) + "".join(choice.text)
        tokens = [*choice.prompt_tokens, *choice.tokens]
        logprobs = self._logprobs(choice, tokens) if self.logprobs else None
        return {"index": choice.index, "text": text, "logprobs": logprobs}

    def _part(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None}

    def _parts(self, choice: Choice, event: Event) -> list[dict[str, Any]]:
        part, tokens = self._part(choice), list(event.tokens)
        if self.echo and not choice.started:
            part["text"] = self._echoed(choice)
        if event.prompt is not None:
            tokens = [*event.prompt, *tokens]
        part["text"] += event.text
        if event.finish is not None:
            part |= {"finish_reason": event.finish, "stop_reason": event.stop_reason}
        if self.logprobs and tokens:
            part["logprobs"] = self._logprobs(choice, tokens)
        return [part] if part != self._part(choice) else []

    def _echoed(self, choice: Choice) -> str:
        if not self.echo:
            return ""
        given = choice.prompt.text
        return self.texts.decode(choice.prompt.tokens) if given is None else given

    def _logprobs(self, choice: Choice, tokens: Sequence[Token]) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(choice.offset)
            choice.offset += len(self.texts.text(token.id))
        return {
            "tokens": [self.texts.label(token.id) for token in tokens],
            "token_logprobs": [
                None if token.logprob is None else finite(token.logprob) for token in tokens
            ],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": offsets,
        }

    def _top(self, token: Token) -> dict[str, float] | None:
        """By text, which two tokens may share: then the likelier one counts.

        Otherwise a token that is not the likeliest could look as if it were.
        """
        if token.logprob is None:
            return None
        found: dict[str, float] = {}
        for id, logprob in (*token.top, (token.id, token.logprob)):
            label, value = self.texts.label(id), finite(logprob)
            found[label] = max(value, found.get(label, value))
        return found


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot be."""
    return max(logprob, -9999.0)


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens of each prompt once, of each answer, and those that were not read again."""
    prompts = {id(choice.prompt): choice.prompt for choice in choices}
    cached: dict[int, int] = {}
    for choice in choices:
        cached[id(choice.prompt)] = max(choice.cached, cached.get(id(choice.prompt), 0))
    read = sum(len(prompt.tokens) for prompt in prompts.values())
    new = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": read,
        "completion_tokens": new,
        "total_tokens": read + new,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }


def kept(choices: Sequence[Choice]) -> dict[str, Any]:
    """How much of what was read the caches still held at the end; {} if nobody said."""
    last = [choice.drops[-1] for choice in choices if choice.drops]
    shares = [sum(d.kept) / (len(d.kept) * d.step) for d in last if d.kept and d.step]
    if not last or not shares:
        return {}
    return {
        "kept_share": round(sum(shares) / len(shares), 6),
        "bytes": sum(drops.bytes for drops in last),
        "dense_bytes": sum(drops.dense_bytes for drops in last),
    }
