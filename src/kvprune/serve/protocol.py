"""The bodies of requests: OpenAI's fields, those that other servers added, and our own.

Fields that nobody knows are ignored; those that would have an effect here and have none are refused
(kvprune.serve.unsupported). Numbers that an operator may choose are in kvprune.serve.limits.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from kvprune.serve.limits import Limits
from kvprune.serve.request import RequestError, Sampling, Settings
from kvprune.serve.unsupported import refuse_unsupported


def _encodable(text: str) -> str:
    """Refuse half a surrogate pair: JSON can hold one, text that a tokenizer reads cannot."""
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError("is not valid Unicode: it holds half of a surrogate pair") from error
    return text


Text = Annotated[str, AfterValidator(_encodable)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    # strict: "2" is no number and 1 is no truth value, as with OpenAI
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class Pruning(BaseModel):
    """What a request changes of the pruning, and what it wants to know of it."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    report: bool = Field(
        default=False, description="Tell which tokens were dropped, where and by whom."
    )
    threshold: float | None = Field(
        default=None, description="Higher prunes more; null: as trained."
    )
    protect_recent: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="Latest tokens that are not dropped yet."
    )


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Body):
    """What chats and completions have in common."""

    model: str | None = Field(None, description="As /v1/models names it, or left out.")
    max_tokens: int | None = Field(None, ge=0)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 or -1: all.")
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Text | list[Text] | None = None
    include_stop_str_in_output: bool | None = None
    n: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = Field(
        None, max_length=256, description="Prefixes are shared among requests of one salt only."
    )
    kvprune: Pruning | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def pruning(self) -> Pruning:
        return self.kvprune or Pruning()

    @property
    def settings(self) -> Settings:
        return Settings(self.pruning.threshold, self.pruning.protect_recent)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    def check(self, limits: Limits) -> None:
        """Refuse what the operator's limits or this server do not allow."""
        refuse_unsupported(self.model_extra)
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options needs stream: true; leave it out", param="stream_options"
            )
        _at_most("n", self.choices, limits.choices)
        _at_most("stop", len(self.stops), limits.stops)
        _at_most("logit_bias", len(self.logit_bias or ()), limits.biases)
        for stop in self.stops:
            if not stop:
                raise RequestError("stop holds an empty string; leave it out", param="stop")
            if len(stop) > limits.stop_length:
                text = f"a stop string has {len(stop):,} characters; the most is"
                raise RequestError(f"{text} {limits.stop_length:,}", param="stop")

    def sampling(self, vocabulary: int) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else float(self.temperature),
            top_p=1.0 if self.top_p is None else float(self.top_p),
            top_k=max(0, self.top_k or 0),
            min_p=float(self.min_p or 0),
            presence_penalty=float(self.presence_penalty or 0),
            frequency_penalty=float(self.frequency_penalty or 0),
            repetition_penalty=float(self.repetition_penalty or 1),
            logit_bias={
                _token_id(key, vocabulary): float(bias)
                for key, bias in (self.logit_bias or {}).items()
            },
            seed=self.seed,
        )


class Part(Body):
    type: str
    text: Text | None = None


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | list[Part] | None = None

    def plain(self, where: str) -> dict[str, str]:
        """Role and text for the model's template, refused if it holds more than text."""
        extra = self.model_extra or {}
        if self.role in ("tool", "function") or extra.get("tool_calls"):
            raise RequestError(
                f"{where} is of a tool call; this server supports no tools", param="messages"
            )
        role = "system" if self.role == "developer" else self.role
        if self.content is None and role != "assistant":
            raise RequestError(f"{where} has no content; give it a text", param="messages")
        if not isinstance(self.content, list):
            return {"role": role, "content": self.content or ""}
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise RequestError(
                    f"{where} holds content of type {part.type[:40]!r}; the model reads text only",
                    param="messages",
                )
        return {"role": role, "content": "".join(part.text or "" for part in self.content)}


class ChatBody(Generation):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self, limits: Limits) -> None:
        super().check(limits)
        _at_most("messages", len(self.messages), limits.messages)
        _at_most("top_logprobs", self.top_logprobs or 0, limits.logprobs)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )

    def plain_messages(self) -> list[dict[str, str]]:
        return [message.plain(f"messages[{i}]") for i, message in enumerate(self.messages)]

    @property
    def limit(self) -> int | None:
        chosen = self.max_completion_tokens
        return self.max_tokens if chosen is None else chosen

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


def _kind(prompt: Any) -> str:
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else ""
    if isinstance(first, list):
        return "id_lists"
    return "ids" if isinstance(first, int) else "texts"


Prompt = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[list[Text], Tag("texts")]
    | Annotated[list[TokenId], Tag("ids")]
    | Annotated[list[list[TokenId]], Tag("id_lists")],
    # by its first element: a long list is not tried as each kind in turn
    Discriminator(_kind),
]


class CompletionBody(Generation):
    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0)
    add_special_tokens: bool | None = None

    def check(self, limits: Limits) -> None:
        super().check(limits)
        _at_most("logprobs", self.logprobs or 0, limits.logprobs)
        prompts = self.prompts()
        if not prompts:
            raise RequestError("prompt is an empty list; give at least one", param="prompt")
        _at_most("prompt", len(prompts), limits.prompts)
        _at_most("prompt × n", len(prompts) * self.choices, limits.rows, "n")

    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


class TokenizeBody(Body):
    prompt: Text | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    tokens: list[TokenId]


class PrefixBody(Body):
    """A text, its tokens, or the first messages of chats, to be read once and kept."""

    model: str | None = Field(None, description="As /v1/models names it, or left out.")
    prompt: Text | list[TokenId] | None = Field(None, description="A text or its tokens.")
    messages: list[Message] | None = None
    cache_salt: str | None = Field(None, max_length=256)
    kvprune: Pruning | None = None


def _at_most(name: str, value: int, most: int, param: str | None = None) -> None:
    if value > most:
        raise RequestError(
            f"{name} of {value:,} is too many; the most is {most:,}", param=param or name
        )


def _token_id(key: str, vocabulary: int) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocabulary):
        raise RequestError(
            f"logit_bias: {key[:20]!r} is no token id; the model has 0 to {vocabulary - 1}",
            param="logit_bias",
        )
    return int(key)
