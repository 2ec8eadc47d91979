"""Text that says something again: quotes, captions, lists and code, near and far.

A model that forgets must keep what will be repeated, and plain books seldom repeat. Each function
makes one text from a document and from another one that lies between the two occurrences.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from random import Random

from experiments.smollm2.chats import paragraphs

# characters between a passage and its return: from the next line to about 1,700 tokens
GAPS = (0, 200, 800, 2_000, 4_000, 7_500)
LENGTHS = (80, 200, 500, 1_200, 2_400)  # of a passage that returns
QUOTE = (
    "As quoted above: \"{0}\"", "Once more:\n\n{0}", "{0}", "The text began with these words: {0}",
    "To repeat the passage word for word:\n\n{0}", "> {0}", "Copy of the passage:\n{0}",
)  # fmt: skip
CAPTION = ("Figure {0}.{1} {2}", "Image: {2}", "[{2}]", "Table {0}.{1}. {2}", 'alt="{2}"')


def repeated(name: str, text: str, other: str) -> str:
    """One of the ways to repeat, by the name of the text."""
    random = Random(f"repeat {name}")
    return random.choice(WAYS)(text, other, random)


def passage(text: str, other: str, random: Random) -> str:
    """A passage, other text, the passage again; then the same with a part of it, farther away."""
    parts = paragraphs(text)
    begin = random.randrange(len(parts))
    quoted = clip("\n\n".join(parts[begin:]), random.choice(LENGTHS))
    between = clip(other, random.choice(GAPS))
    later = clip(other[len(between) :], random.choice(GAPS))
    part = clip(quoted[random.randrange(1 + len(quoted) // 2) :].lstrip(), random.choice(LENGTHS))
    before = clip("\n\n".join(parts[:begin]), random.choice(GAPS))
    again = random.choice(QUOTE).format(quoted)
    return joined(before, quoted, between, again, later, random.choice(QUOTE).format(part))


def captions(text: str, other: str, random: Random) -> str:
    """Some sentences appear twice: as a caption, and in the text or as another caption."""
    out, chapter = [], random.randint(1, 30)
    for number, paragraph in enumerate(paragraphs(text)[:40]):
        out.append(paragraph)
        sentences = re.findall(r"[A-Z][^.!?\n]{30,250}[.!?]", paragraph)
        if sentences and random.random() < 0.5:
            sentence = random.choice(sentences)
            first, second = random.sample(CAPTION, 2)
            caption = first.format(chapter, number, sentence)
            if random.random() < 0.6:
                caption += "\n" + second.format(chapter, number, sentence)
            out.append(caption)
    return joined(*out)


def lists(text: str, other: str, random: Random) -> str:
    """Items of a list, then the list again in another order, or as a table."""
    items = re.findall(r"[A-Z][^.!?\n]{15,120}(?=[.!?])", text)[:60]
    if len(items) < 4:
        return passage(text, other, random)
    chosen = random.sample(items, min(len(items), random.randint(4, 12)))
    shuffled = random.sample(chosen, len(chosen))
    first = "\n".join(f"- {item}" for item in chosen)
    mark = random.choice(("{0}. {1}", "| {0} | {1} |", "* {1}", "{1};"))
    second = "\n".join(mark.format(number, item) for number, item in enumerate(shuffled, 1))
    return joined(first, clip(other, random.choice(GAPS)), second, clip(text, 1_500))


WAYS = (passage, passage, captions, lists)


def edited(name: str, code: str) -> Iterator[str]:
    """Functions of a program, each followed by itself with one name changed."""
    random = Random(f"edit {name}")
    blocks = re.split(r"\n(?=(?:def|class|async def) )", code)[1:]
    for block in blocks:
        names = re.findall(r"\b[a-z_]{4,}\b", block)
        if not 200 < len(block) < 3_000 or not names:
            continue
        old = random.choice(names)
        new = re.sub(rf"\b{old}\b", random.choice(("value", "result", "item_", "current")), block)
        yield joined(f"```python\n{block.rstrip()}\n```", f"```python\n{new.rstrip()}\n```")


def clip(text: str, characters: int) -> str:
    """At most that many characters, cut after a word."""
    if len(text) <= characters:
        return text
    return text[:characters].rsplit(maxsplit=1)[0] if characters else ""


def joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def pairs(documents: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Name and repeating text of each (name, text); what lies between comes from the next one."""
    for (name, text), (_, other) in zip(documents, [*documents[1:], *documents[:1]], strict=True):
        yield name, repeated(name, text, other)
