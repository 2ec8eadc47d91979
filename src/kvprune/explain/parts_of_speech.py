"""The part of speech of each token: that of the word it belongs to."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from kvprune.errors import PruneError
from kvprune.explain.token_text import is_punctuation

PARTS = (
    "noun", "name", "verb", "adjective", "adverb", "pronoun", "determiner", "preposition",
    "conjunction", "number", "punctuation", "other",
)  # fmt: skip
# by prefix of the BNC's C5 tags, which HanTa's English model uses
C5_PREFIXES = {
    "NN": "noun", "NP": "name", "V": "verb", "AJ": "adjective", "AV": "adverb", "XX": "adverb",
    "PN": "pronoun", "EX": "pronoun", "AT": "determiner", "DT": "determiner", "DP": "determiner",
    "PR": "preposition", "TO": "preposition", "IN": "preposition", "CJ": "conjunction",
    "CR": "number", "OR": "number", "PU": "punctuation",
}  # fmt: skip
# by tag of Universal Dependencies, which spaCy uses
UNIVERSAL_TAGS = {
    "NOUN": "noun", "PROPN": "name", "VERB": "verb", "AUX": "verb", "ADJ": "adjective",
    "ADV": "adverb", "PART": "adverb", "PRON": "pronoun", "DET": "determiner",
    "ADP": "preposition", "CCONJ": "conjunction", "SCONJ": "conjunction", "NUM": "number",
    "PUNCT": "punctuation", "SYM": "punctuation",
}  # fmt: skip

WORD = re.compile(r"n['’]t\b|['’](?:s|re|ve|ll|d|m)\b|\w+?(?=n['’]t\b)|\w+|[^\w\s]")
SENTENCE_END = frozenset(".!?")


def available() -> bool:
    """Whether a tagger is installed."""
    return _has_spacy() or bool(importlib.util.find_spec("HanTa"))


def tag_tokens(tokens: Sequence[str]) -> list[str]:
    """One of PARTS per token: that of the word that contains its first letter.

    Whitespace and incomplete characters are "other".
    """
    text = "".join(tokens)
    words = [(match.start(), match.end()) for match in WORD.finditer(text)]
    parts = _tag_words([text[first:last] for first, last in words])
    word_at = {offset: n for n, (first, last) in enumerate(words) for offset in range(first, last)}
    tags, offset = [], 0
    for token in tokens:
        first = offset + len(token) - len(token.lstrip())
        word = word_at.get(first) if token.strip() else None
        tags.append("other" if word is None else parts[word])
        offset += len(token)
    return tags


def _tag_words(words: list[str]) -> list[str]:
    parts: list[str] = []
    sentence: list[str] = []
    for number, word in enumerate(words):
        sentence.append(word)
        if word in SENTENCE_END or number == len(words) - 1 or len(sentence) == 200:
            parts += _tag_sentence(sentence)
            sentence = []
    # taggers are unreliable on punctuation and emoji
    return [_symbol_part(word) or part for word, part in zip(words, parts, strict=True)]


def _symbol_part(word: str) -> str | None:
    if any(c.isalnum() for c in word):
        return None
    return "punctuation" if is_punctuation(word) else "other"


def _tag_sentence(words: list[str]) -> list[str]:
    name, tagger = _tagger()
    words = [word.replace("’", "'") for word in words]
    if name == "spacy":
        return [UNIVERSAL_TAGS.get(token.pos_, "other") for token in tagger(words)]
    return [_part(tag) for _, _, tag in tagger.tag_sent(words)]


def _part(tag: str) -> str:
    return next((part for start, part in C5_PREFIXES.items() if tag.startswith(start)), "other")


def _has_spacy() -> bool:
    return all(importlib.util.find_spec(name) for name in ("spacy", "en_core_web_sm"))


@functools.cache
def _tagger() -> tuple[str, Any]:
    """spaCy with its small English model if both are installed, otherwise HanTa."""
    if _has_spacy():
        import spacy
        from spacy.tokens import Doc

        pipeline = spacy.load("en_core_web_sm")
        return "spacy", lambda words: pipeline(Doc(pipeline.vocab, words))
    try:
        from HanTa import HanoverTagger
    except ImportError as error:
        raise PruneError("parts of speech need a tagger: pip install 'kvprune[explain]'") from error
    return "HanTa", HanoverTagger.HanoverTagger("morphmodel_en.pgz")
