"""What people ask an assistant: conversations of one to four questions, made from documents.

    conversation = make(document, number)     # {"id", "kind", "system", "sampled", "turns"}

A question has its subject or passage from a document and its wording from a list; the dense model
answers (answers.py). Everything follows from the document's id and the number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random
from typing import Any

from experiments.smollm2.chats import paragraphs, title_of
from experiments.smollm2.text import Document

NAMES = ("Otto", "Mia", "Carlos", "Priya", "Hannah", "Kenji", "Zoe", "Amir", "Ruth", "Leo", "Ivy",
         "Pavel", "Nora", "Samuel", "Aisha", "Tom", "Greta", "Felix", "Lucia", "Ben")  # fmt: skip
PETS = (("dog", "Biscuit"), ("cat", "Pixel"), ("parrot", "Captain"), ("horse", "Willow"),
        ("rabbit", "Clover"), ("tortoise", "Turbo"), ("goldfish", "Bubbles"))  # fmt: skip
PLACES = ("Lisbon", "Oslo", "Nairobi", "Toronto", "Lima", "Osaka", "Dublin", "Cairo", "Prague",
          "Austin", "Hanoi", "Perth")  # fmt: skip
COUNTRIES = ("France", "Japan", "Brazil", "Kenya", "Canada", "Italy", "Egypt", "Norway", "India",
             "Mexico", "Australia", "Poland", "Spain", "Greece", "Chile", "Germany")  # fmt: skip
JOBS = ("nurse", "carpenter", "teacher", "baker", "pilot", "student", "gardener", "engineer")

FACTS = (
    "What is the capital of {country}?", "Which language do people speak in {country}?",
    "What is {n} plus {m}?", "What is {n} times {small}?", "How many days are in {small} weeks?",
    "Why is the sky blue?", "What causes the seasons?", "How does a vaccine work?",
    "What is photosynthesis?", "Who wrote Hamlet?", "What is the boiling point of water?",
    "How do I boil an egg?", "What is a good way to learn to cook?", "How do magnets work?",
    "What is the largest ocean?", "Why do cats purr?", "What is inflation?", "What is an atom?",
    "Can you recommend a book about {country}?", "What should I see in {country}?",
    "How far away is the Moon?", "What is the difference between a virus and a bacterium?",
)  # fmt: skip
ABOUT = (
    "What is {title}?", "Tell me about {title}.", "Who or what is {title}?", "Explain {title}.",
    "Give me three facts about {title}.", "Write one paragraph about {title}.",
    "Explain {title} to a ten-year-old.", "List five things to know about {title}.",
    "Why is {title} important?", "I have never heard of {title}. What is it?",
    "Write a short quiz with answers about {title}.", "What are common mistakes about {title}?",
    "Make a table with two columns, term and meaning, about {title}.",
    "Compare {title} with {other}.", "What do {title} and {other} have in common?",
    "{title}", "define: {title}", "pros and cons of {title}",
)  # fmt: skip
WRITE = (
    "Write a poem about {title}.", "Write a short story that mentions {title}.",
    "Write a polite email to {name} about {title}.", "Write a slogan for {title}.",
    "Write a letter to a friend in {place} about {title}.", "Write a limerick about {country}.",
    "Write a dialogue between {name} and a {job} about {title}.", "Give {title} a new name.",
    "Write a product description for a {pet} toy.", "Write a speech about {title}.",
    "Write a recipe that a {job} from {country} might like.", "Invent a game about {title}.",
)  # fmt: skip
PASSAGE = (
    "Summarise this:\n\n{text}", "{text}\n\nWhat is the main point?", "{text}\n\nTL;DR?",
    "Summarise the following text in one sentence.\n\n{text}", "Give this a title:\n\n{text}",
    "Rewrite this in simpler words:\n\n{text}", "List the key points of this text:\n\n{text}",
    "Who and what is mentioned here?\n\n{text}", "Translate into French:\n\n{text}",
    "Turn this into bullet points.\n\n{text}", "{text}\n\nAsk me three questions about this text.",
    "Is the tone of this text positive or negative? Explain.\n\n{text}",
    "Read this text and answer: who is it about, and when did it happen?\n\n{text}",
)  # fmt: skip
COPY = (
    "Repeat the following text word for word:\n\n{text}", "{text}\n\nRepeat that exactly.",
    "Copy this text, and change nothing:\n\n{text}", "Quote the first sentence of this:\n\n{text}",
    "Correct any mistakes, and otherwise keep the text as it is:\n\n{text}",
    "Write this text again in capital letters:\n\n{text}", "{text}\n\nWhat is its last sentence?",
    "Quote the sentence of this text that mentions \"{word}\".\n\n{text}",
    "Text: {text}\n\nWhat does the text say about {word}? Quote it.",
)  # fmt: skip
CODE = (
    "reverses a string", "counts the vowels of a word", "returns the largest of three numbers",
    "checks whether a number is prime", "sorts a list of names by length", "adds two matrices",
    "reads a CSV file and prints its columns", "computes the factorial of n", "merges two dicts",
    "finds the median of a list", "removes duplicates from a list", "flips a coin n times",
    "converts Celsius to Fahrenheit", "prints the first n Fibonacci numbers", "parses a date",
    "counts the words of a text file", "checks balanced brackets", "finds the longest word",
    "rolls two dice and returns their sum", "computes the mean of a list", "prints a triangle",
)  # fmt: skip
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "C", "SQL", "Bash", "Java")
SNIPPETS = (
    "def total(values):\n    result = 0\n    for value in values:\n        result = value\n"
    "    return result",
    "def is_even(n):\n    if n % 2 = 0:\n        return True\n    return False",
    "for i in range(10)\n    print(i * i)", "names = ['a', 'b']\nprint(names[2])",
    "function add(a, b) {\n  console.log(a + b)\n}\nconst sum = add(1, 2)",
    "def greet(name):\n    print('Hello, ' + name + '!')\n\ngreet(42)",
)  # fmt: skip
EDIT = (
    "What does this code do?\n\n```\n{code}\n```", "Find the bug:\n\n```\n{code}\n```",
    "```\n{code}\n```\n\nRename every variable and show the whole code again.",
    "Add comments to this code:\n\n```\n{code}\n```", "```\n{code}\n```\nFix this, please.",
)  # fmt: skip
SUMS = (
    "{name} has {n} apples and buys {m} more, then gives {small} to a friend. How many are left?",
    "A train goes {n} miles in {small} hours. What is its speed?",
    "A shirt costs {n} dollars and is {small}0 % off. What does it cost now?",
    "What is ({n} + {m}) * {small}? Show your steps.", "Solve for x: {small}x + {n} = {m}.",
    "A rectangle is {n} by {m} metres. What are its area and perimeter?",
    "Write the numbers from {small} to {n} that can be divided by 3.",
)  # fmt: skip
INTRO = (
    "Hi! My name is {name} and my {pet} is called {called}.", "Hello, I am {name} from {place}.",
    "I'm a {job} and I live in {place}.", "Good morning! I am {name}, a {job}.", "Hey,",
    "My {pet} {called} is {small} years old.", "Quick question from {place}:", "Hello!", "Hi.",
)  # fmt: skip
MORE = (
    "Tell me more.", "Can you give an example?", "Shorter, please.", "Why?", "Are you sure?",
    "Say that again in other words.", "What was the most important part of that?", "Thanks!",
    "Put that in a list.", "Now write it as a poem.", "Explain the last point again.",
    "How do you know that?", "What would be a counterargument?", "Repeat your answer, please.",
)  # fmt: skip
BACK = (
    "What was my first question?", "What did I ask you at the beginning?", "Sum up our chat.",
    "Repeat your first answer word for word.", "Which of your answers was the longest?",
)  # fmt: skip
RECALL = (
    "By the way, what was my name?", "Do you remember what I told you about myself?",
    "What did I say in my first message?",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.", "You answer in one short sentence.", "You are a pirate.",
    "You are a patient teacher who explains things step by step.", "You are a travel guide.",
    "You are an editor. Be brief and precise.", "Answer with a list wherever you can.",
)  # fmt: skip
SIZES = (300, 600, 1_200, 2_400, 4_000)  # characters of a passage


def make(document: Document, number: int) -> dict[str, Any]:
    """The conversation of this number about a document; its answers are still missing."""
    random = Random(f"{document.name} {number}")
    kind = random.choice(sorted(KINDS))
    values = _values(document, random)
    turns = [KINDS[kind](random, values)]
    told = None
    if random.random() < 0.3:
        told = random.choice(INTRO)
        turns[0] = f"{told} {turns[0]}"
    for _ in range(random.choice((0, 0, 0, 1, 1, 2, 3))):
        turns.append(_follow_up(random, kind, len(turns), told))
    system = random.choice(SYSTEMS) if random.random() < 0.25 else None
    return {
        "id": f"{document.name} {number}",
        "kind": kind,
        "system": system,
        "sampled": random.random() < 0.6,
        "turns": [_fill(turn, values) for turn in turns],
    }


def _follow_up(random: Random, kind: str, turn: int, told: str | None) -> str:
    draw = random.random()
    if draw < 0.25:
        return KINDS[random.choice(("fact", "about", "sum"))](random, {})
    if draw < 0.4 and told is not None and "{name}" in told:
        return random.choice(RECALL)
    if draw < 0.55 and turn > 1:
        return random.choice(BACK)
    return random.choice(MORE)


def _values(document: Document, random: Random) -> dict[str, Any]:
    """The words that fill the gaps of a wording."""
    text = _passage(document, random)
    words = sorted(set(re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}", text)))
    pet, called = random.choice(PETS)
    title = (title_of(document.text) or document.name.rsplit("/")[-1][:60]).strip()
    return {
        "title": title, "other": random.choice(COUNTRIES), "text": text, "called": called,
        "word": random.choice(words) if words else title, "pet": pet, "name": random.choice(NAMES),
        "place": random.choice(PLACES), "country": random.choice(COUNTRIES),
        "job": random.choice(JOBS), "n": random.randint(11, 99), "m": random.randint(12, 99),
        "small": random.randint(2, 9), "task": random.choice(CODE),
        "language": random.choice(LANGUAGES), "code": random.choice(SNIPPETS),
    }  # fmt: skip


def _passage(document: Document, random: Random) -> str:
    """Paragraphs in a row, from somewhere in the document."""
    parts = [part for part in paragraphs(document.text) if len(part) > 60] or [document.text[:600]]
    first, wanted = random.randrange(len(parts)), random.choice(SIZES)
    held: list[str] = []
    for part in parts[first:]:
        if held and sum(map(len, held)) + len(part) > wanted:
            break
        held.append(part[:wanted])
    return "\n\n".join(held)


def _fill(wording: str, values: dict[str, Any]) -> str:
    """In one pass, so that braces in a passage stay as they are."""
    return re.sub(r"\{(\w+)\}", lambda gap: str(values.get(gap[1], gap[0])), wording)


def _one_of(wordings: tuple[str, ...]) -> Callable[[Random, dict[str, Any]], str]:
    return lambda random, values: random.choice(wordings)


def _program(random: Random, values: dict[str, Any]) -> str:
    if random.random() < 0.4:
        return random.choice(EDIT)
    return "Write a {language} function that {task}."


def _table(random: Random, values: dict[str, Any]) -> str:
    """A small table of made-up rows, and a question that one of its cells answers."""
    people = random.sample(NAMES, random.randint(3, 8))
    rows = [(name, random.choice(PLACES), random.randint(20, 70)) for name in people]
    separator = random.choice((", ", " | ", "\t"))
    lines = [separator.join(map(str, row)) for row in (("name", "city", "age"), *rows)]
    asked = random.choice(people)
    questions = (
        f"Where does {asked} live?", f"How old is {asked}?", "Who is the oldest?",
        "Write this table as JSON.", "Sort the rows by age.", "Repeat the table.",
    )  # fmt: skip
    return "\n".join(lines) + "\n\n" + random.choice(questions)


# what the first question is about; those that look back at a passage are the more frequent ones
KINDS: dict[str, Callable[[Random, dict[str, Any]], str]] = {
    "fact": _one_of(FACTS),
    "about": _one_of(ABOUT),
    "about-again": _one_of(ABOUT),
    "write": _one_of(WRITE),
    "passage": _one_of(PASSAGE),
    "passage-again": _one_of(PASSAGE),
    "copy": _one_of(COPY),
    "code": _program,
    "sum": _one_of(SUMS),
    "table": _table,
}
