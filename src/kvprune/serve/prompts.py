"""Prompts as tokens: texts, lists of ids, and chats by the model's own template."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprune.chat.template import Template
from kvprune.errors import PruneError
from kvprune.serve.request import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvprune.chat.template import Message


@dataclass(frozen=True)
class Prompt:
    tokens: tuple[int, ...]
    boundaries: tuple[int, ...] = ()  # after so many tokens another request may go on differently
    text: str | None = None  # as it was given, None for a list of ids


class Prompts:
    """Makes prompts; safe in several threads, one at a time."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str, vocabulary: int):
        self.tokenizer, self.name, self.vocabulary = tokenizer, name, vocabulary
        self._lock = threading.Lock()

    def of_text(self, text: str, special: bool = True) -> Prompt:
        with self._lock:
            ids = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return Prompt(tuple(ids), text=text)

    def of_ids(self, ids: Sequence[int], param: str = "prompt") -> Prompt:
        if wrong := [token for token in ids if not 0 <= token < self.vocabulary]:
            raise RequestError(
                f"token id {wrong[0]} is out of vocabulary; the model has 0 to "
                f"{self.vocabulary - 1}",
                param=param,
            )
        return Prompt(tuple(ids))

    def of_chat(
        self, messages: Sequence[Message], answer: bool = True, go_on: bool = False
    ) -> Prompt:
        """`answer`: up to where the answer starts; `go_on`: the last message is not over yet."""
        template = self._template()
        with self._lock:
            try:
                text = template.prompt(messages, answer=answer and not go_on, go_on=go_on)
            except PruneError as error:
                raise RequestError(str(error), param="messages") from error
            except (TypeError, ValueError) as error:
                # its text may quote the conversation
                raise RequestError(
                    "the model's chat template cannot write this conversation"
                    + (" so that its last message goes on" if go_on else ""),
                    param="messages",
                ) from error
            tokens = template.tokens(text)
            ends = (self._end(template, start, tokens) for start in _starts(messages))
            boundaries = {end for end in ends if 0 < end < len(tokens)}
        return Prompt(tuple(tokens), tuple(sorted(boundaries)), text)

    def _template(self) -> Template:
        if not self.tokenizer.chat_template:
            raise RequestError(
                f"{self.name} has no chat template, so the format of its turns is unknown; "
                f"use /v1/completions, or serve a chat model (often named -instruct or -chat)",
                code="no_chat_template",
                param="messages",
            )
        return Template(self.tokenizer)

    @staticmethod
    def _end(template: Template, messages: Sequence[Message], tokens: list[int]) -> int:
        """How many of the tokens are those of the first messages; 0 unless exactly those are.

        A template may write a message differently when it is not the last, and a tokenizer may join
        letters across the seam: a snapshot there would be of another text.
        """
        try:
            start = template.tokens(template.prompt(messages, answer=False))
        except (PruneError, IndexError):
            # some templates refuse a conversation without a user's message
            return 0
        return len(start) if tokens[: len(start)] == start else 0


def _starts(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """The system message alone, and all that comes before the last message of the user."""
    starts = []
    if messages[0]["role"] == "system":
        starts.append(messages[:1])
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if users and users[-1] > 1:
        starts.append(messages[: users[-1]])
    return starts
