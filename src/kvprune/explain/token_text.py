"""The text of each token, and its kind: word, punctuation, number, ..."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# how an incomplete UTF-8 sequence decodes; a character has at most four bytes
REPLACEMENT, MAX_CHARACTER_BYTES = "�", 4
# preceding tokens decoded as context, since some decoders strip a leading space
CONTEXT = 4

KINDS = ("punctuation", "line break", "word", "part of a word", "number", "other")


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, ...]:
    """One string per token; joined they are the decoded text.

    A character that is split over several tokens is assigned to the last of them; the others
    are empty.
    """

    def decode(first: int, last: int) -> str:
        text = tokenizer.decode(
            list(ids[first:last]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    texts: list[str] = []
    start = 0  # the first token whose text is not yet assigned
    for i in range(len(ids)):
        context = max(0, start - CONTEXT)
        text = decode(context, i + 1)[len(decode(context, start)) :]
        incomplete = (
            text.endswith(REPLACEMENT) and i + 1 < len(ids) and i + 1 - start < MAX_CHARACTER_BYTES
        )
        texts.append("" if incomplete else text)
        if not incomplete:
            start = i + 1
    return tuple(texts)


def token_kind(token: str) -> str:
    """One of KINDS, decided by the token's text alone."""
    text = token.strip()
    if not text:
        return "line break" if "\n" in token else "other"
    if text.startswith("<|") or (text.startswith("<") and text.endswith(">") and len(text) > 2):
        return "other"
    if is_punctuation(text):
        return "punctuation"
    if text[0].isdigit():
        return "number"
    if text[0].isalpha():
        return "word" if token[0].isspace() else "part of a word"
    return "other"


def is_punctuation(text: str) -> bool:
    """Only punctuation marks and signs; emoji (category So) do not count."""
    categories = [unicodedata.category(c) for c in text]
    return all(c[0] == "P" or c in ("Sc", "Sk", "Sm") for c in categories)
