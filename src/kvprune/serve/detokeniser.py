"""The text of a growing list of tokens, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvprune.chat.template import BROKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# tokens before the first new one that may change its text: a space, a part of a character
LOOK_BACK = 6


class Detokeniser:
    """Text piece by piece: what it has given out is never taken back.

    Tokens are decoded together with a few before them, since the text of one may depend on those; a
    character whose bytes are incomplete waits for the rest.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._tokens = list(prompt[-LOOK_BACK:])
        self._start, self._read = 0, len(self._tokens)

    def add(self, token: int) -> str:
        """The new text that is complete."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._start : self._read])
        text = self._decode(self._tokens[self._start :])
        if text.endswith(BROKEN) and len(self._tokens) - self._read < LOOK_BACK:
            return ""
        self._start, self._read = self._read, len(self._tokens)
        if self._start > 64:  # an answer may be long
            del self._tokens[: self._start]
            self._start, self._read = 0, len(self._tokens)
        return text[len(before) :]

    def end(self) -> str:
        """What is left, complete or not."""
        before = self._decode(self._tokens[self._start : self._read])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(
                tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )


class Stops:
    """Looks for stop strings, and holds back text that may be the beginning of one."""

    def __init__(self, stops: Sequence[str], include: bool = False):
        self._stops, self._include = [stop for stop in stops if stop], include
        self._hold = max((len(stop) for stop in self._stops), default=1) - 1
        self._held = ""

    def add(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """The text that may be given out, and the stop string that ends it, if one does.

        Of several the one that is complete first wins. Text before `may_stop` cannot stop.
        """
        if not may_stop:
            given, self._held = self._held + text, ""
            return given, None
        self._held += text
        ends = [
            (at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0
        ]
        if ends:
            end, start, stop = min(ends)
            given, self._held = self._held[: end if self._include else start], ""
            return given, stop
        keep = self._longest_beginning()
        given = self._held[: len(self._held) - keep]
        self._held = self._held[len(given) :]
        return given, None

    def end(self) -> str:
        """What was held back."""
        given, self._held = self._held, ""
        return given

    def _longest_beginning(self) -> int:
        """Characters at the end that a stop string begins with."""
        for size in range(min(self._hold, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
