"""The text of single tokens, and what kind of token each is."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# how a byte that is no whole character decodes; UTF-8 has at most four bytes a character
BROKEN, LONGEST = "�", 4
# tokens before a piece that are decoded with it: some decoders drop a leading space
BEFORE = 4

KINDS = ("punctuation", "line break", "word", "part of a word", "number", "other")


def pieces(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, ...]:
    """One string a token; joined they are the decoded text.

    A character that is split over several tokens belongs to the one that completes it; the parts
    before are empty.
    """

    def decode(first: int, last: int) -> str:
        text = tokenizer.decode(
            list(ids[first:last]), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    made: list[str] = []
    start = 0  # the first token that has not been given its text
    for i in range(len(ids)):
        before = max(0, start - BEFORE)
        text = decode(before, i + 1)[len(decode(before, start)) :]
        waits = text.endswith(BROKEN) and i + 1 < len(ids) and i + 1 - start < LONGEST
        made.append("" if waits else text)
        if not waits:
            start = i + 1
    return tuple(made)


def kind(piece: str) -> str:
    """One of KINDS, judged by the token's text alone."""
    text = piece.strip()
    if not text:
        return "line break" if "\n" in piece else "other"
    if text.startswith("<|") or (text.startswith("<") and text.endswith(">") and len(text) > 2):
        return "other"
    if is_punctuation(text):
        return "punctuation"
    if text[0].isdigit():
        return "number"
    if text[0].isalpha():
        return "word" if piece[0].isspace() else "part of a word"
    return "other"


def is_punctuation(text: str) -> bool:
    """Marks and signs alone; a picture (category So) is neither."""
    categories = [unicodedata.category(c) for c in text]
    return all(c[0] == "P" or c in ("Sc", "Sk", "Sm") for c in categories)
