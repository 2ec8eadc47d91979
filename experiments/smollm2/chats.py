"""Documents as conversations: a question in one of several wordings, the document as the answer.

The loss is the KL to the dense model, so an answer need not be what the model would write: its
prediction at each token, in the middle of a chat, is the target. What matters is the shape: turns,
questions that look back, a change of subject, a question after a long passage.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from random import Random

Turn = tuple[str, str]  # user, assistant

TELL = (
    "Tell me about {0}.", "What do you know about {0}?", "Can you explain {0} to me?",
    "I would like to learn about {0}.", "Please write an article: {0}", "{0}, please.",
    "Give me an overview of {0}.", "Who or what is {0}?",
)  # fmt: skip
MORE = (
    "Tell me more.", "Go on.", "What else is there to know?", "Please continue.",
    "Interesting. And then?", "Could you say more about that?", "Anything else?",
)  # fmt: skip
SECTION = ("What about this: {0}?", "Now tell me about {0}.", "{0}?", "And {0}?")
STORY = (
    "Continue this story:\n\n{0}", "Here is how my story begins. Please go on with it.\n\n{0}",
    "{0}\n\nWrite what comes next.", "Finish the chapter that starts like this:\n\n{0}",
)  # fmt: skip
NEXT = ("What happens next?", "Go on, please.", "And then?", "Continue the story.")
SUMMARY = (
    "Summarise this text:\n\n{0}", "{0}\n\nCan you put that in one paragraph?",
    "Please summarise the following article.\n\n{0}", "What is the gist of this?\n\n{0}",
)  # fmt: skip
TITLE = ("What would be a good title for it?", "Now give it a title.", "A headline, please.")
QUOTE = (
    "Here is a text.\n\n{0}\n\nRepeat the sentence that mentions \"{1}\".",
    "{0}\n\nWhere does this text speak of {1}? Quote it word for word.",
    "Read this and find what it says of {1}:\n\n{0}",
)  # fmt: skip
FIRST = ("How did the text begin?", "And what was its first sentence?")


def title_of(text: str) -> str | None:
    """The first line, if it is one."""
    line = text.split("\n", 1)[0].strip()
    return line if 3 <= len(line) <= 90 and line[-1] not in ".:;,!?" else None


def paragraphs(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def taken(parts: list[str], characters: int) -> tuple[str, list[str]]:
    """The first paragraphs, until they have that many characters, and the rest."""
    size = count = 0
    while count < len(parts) and (size < characters or not count):
        size += len(parts[count])
        count += 1
    return "\n\n".join(parts[:count]), parts[count:]


def about(text: str, random: Random, characters: int) -> list[Turn]:
    """An article, one section per question; a heading becomes a question."""
    title, parts = title_of(text), paragraphs(text)
    if title is None or len(parts) < 2:
        return []
    answer, left = taken(parts[1:], random.randint(600, 2000))
    turns, size = [(random.choice(TELL).format(title), answer)], len(answer)
    while left and size < characters:
        heading = title_of(left[0]) if len(left) > 1 and len(left[0]) < 60 else None
        if heading:
            question, left = random.choice(SECTION).format(heading), left[1:]
        else:
            question = random.choice(MORE)
        answer, left = taken(left, random.randint(400, 2000))
        turns.append((question, answer))
        size += len(answer)
    return turns


def story(text: str, random: Random, characters: int) -> list[Turn]:
    """A passage of a book; the user gives its beginning."""
    begin, left = taken(paragraphs(text), random.randint(300, 1500))
    turns: list[Turn] = []
    size, question = len(begin), random.choice(STORY).format(begin)
    while left and size < characters:
        answer, left = taken(left, random.randint(800, 3000))
        turns.append((question, answer))
        size, question = size + len(answer), random.choice(NEXT)
    return turns


def summary(text: str, random: Random, characters: int) -> list[Turn]:
    """The user gives the body; the answers are the lead paragraph and the title."""
    title, parts = title_of(text), paragraphs(text)
    if title is None or len(parts) < 4 or len(parts[1]) < 80:
        return []
    body, _ = taken(parts[2:], characters)
    return [(random.choice(SUMMARY).format(body), parts[1]), (random.choice(TITLE), title)]


def quote(text: str, random: Random, characters: int) -> list[Turn]:
    """A passage, then a question that only looking back can answer."""
    passage, _ = taken(paragraphs(text)[1:], characters)
    sentences = re.findall(r"[A-Z][^.!?\n]{40,250}[.!?](?=\s)", passage)
    names: dict[str, list[str]] = {}
    for sentence in sentences:
        for name in set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}(?: [A-Z][a-z]+)*", sentence)):
            names.setdefault(name, []).append(sentence)
    once = sorted(name for name in names if passage.count(name) == 1)
    if len(once) < 2:
        return []
    first, second = random.sample(once, 2)
    turns = [(random.choice(QUOTE).format(passage, first), names[first][0])]
    turns.append((f"And the one about {second}?", names[second][0]))
    return [*turns, (random.choice(FIRST), sentences[0])]


# the forms of each kind of text, repeated by how often they are chosen
FORMS: dict[str, tuple[Callable[[str, Random, int], list[Turn]], ...]] = {
    "books": (story, story, quote),
    "encyclopedic": (about, about, summary, quote),
    "news": (about, summary, quote),
}


def conversations(
    documents: Iterator[tuple[str, str, str]], characters: int
) -> Iterator[tuple[str, list[Turn]]]:
    """From documents (kind, id, text): id and turns; short ones are joined."""
    open_turns: list[Turn] = []
    open_name = ""
    for kind, name, text in documents:
        random = Random(name)  # seeded by the name: independent of other documents
        turns = random.choice(FORMS[kind])(text, random, characters)
        if not turns:
            continue
        open_name, open_turns = open_name or name, [*open_turns, *turns]
        if sum(len(question) + len(answer) for question, answer in open_turns) >= characters:
            yield open_name, open_turns
            open_name, open_turns = "", []


def messages(turns: list[Turn]) -> list[dict[str, str]]:
    """As a chat template expects them."""
    roles = ("user", "assistant")
    return [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(roles, turn, strict=True)
    ]
