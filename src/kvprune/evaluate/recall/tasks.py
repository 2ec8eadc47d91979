"""Questions that only what was said earlier can answer, in the manner of RULER (Hsieh et al. 2024).

Each function hides something in a text and asks for it. All randomness comes from its argument, so
that the same seed gives the same puzzle for every model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kvprune.errors import PruneError
from kvprune.evaluate.recall.words import CITIES, NOUNS

FACT = "The secret number of the city of {city} is {number}."
KEYS, VALUES, HOPS = 4, 4, 4  # cities with a number, numbers of one city, variables of a chain
COMMON, TIMES, RARE = 3, 4, 10  # words to find, how often each is said, other words
PASSAGE, GIVEN = 30, 5  # words to repeat, and how many of them the answer begins with


@dataclass(frozen=True)
class Puzzle:
    """What stands where in the text, what is asked, and the right answers."""

    inserts: list[tuple[float, str]]  # depth, from 0 at the beginning of the text to 1 at its end
    instruction: str
    question: str
    opening: str  # the first words of the answer, which are given
    answers: tuple[str, ...]
    in_order: bool = False  # only the answers before the first wrong word count


def needle(random: Random, depth: float, words: Sequence[str]) -> Puzzle:
    """One city and its number."""
    return _numbers(random, depth, others=0)


def multikey(random: Random, depth: float, words: Sequence[str]) -> Puzzle:
    """Several cities with a number each; one of them is asked for."""
    return _numbers(random, depth, others=KEYS - 1)


def _numbers(random: Random, depth: float, others: int) -> Puzzle:
    cities = random.sample(CITIES, 1 + others)
    numbers = _distinct(random, 1 + others)
    facts = [FACT.format(city=c, number=n) for c, n in zip(cities, numbers, strict=True)]
    places = [depth, *(random.random() for _ in range(others))]
    return Puzzle(
        list(zip(places, facts, strict=True)),
        "Secret numbers are hidden in this text. Remember them.",
        f"What is the secret number of the city of {cities[0]}?",
        f"The secret number of the city of {cities[0]} is",
        (numbers[0],),
    )


def multivalue(random: Random, depth: float, words: Sequence[str]) -> Puzzle:
    """One city with several numbers, all of them asked for; the first one is at `depth`."""
    city, numbers = random.choice(CITIES), _distinct(random, VALUES)
    places = [depth, *(random.random() for _ in range(VALUES - 1))]
    return Puzzle(
        [
            (place, f"One of the secret numbers of the city of {city} is {number}.")
            for place, number in zip(places, numbers, strict=True)
        ],
        "Secret numbers are hidden in this text. Remember them.",
        f"What are all {VALUES} secret numbers of the city of {city}?",
        f"The secret numbers of the city of {city} are",
        tuple(numbers),
    )


def variables(random: Random, depth: float, words: Sequence[str]) -> Puzzle:
    """X = 4817, Y = X, Z = Y, …: which have the value 4817? Another chain must be told apart.

    The chain begins at `depth`, and each variable is set before it is read.
    """
    names = _names(random, 2 * HOPS)
    numbers = _distinct(random, 2)
    inserts: list[tuple[float, str]] = []
    for chain, number in zip((names[:HOPS], names[HOPS:]), numbers, strict=True):
        first = depth if number == numbers[0] else random.random()
        places = sorted(random.uniform(first, 1) for _ in chain[1:])
        inserts.append((first, f"VAR {chain[0]} = {number}."))
        inserts += [
            (place, f"VAR {later} = VAR {earlier}.")
            for place, earlier, later in zip(places, chain, chain[1:], strict=False)
        ]
    return Puzzle(
        inserts,
        "Variables are set in this text. Keep track of their values.",
        f"Which {HOPS} variables have the value {numbers[0]}, directly or through another one?",
        f"The variables with the value {numbers[0]} are VAR",
        tuple(names[:HOPS]),
    )


def common_words(random: Random, depth: float, words: Sequence[str]) -> Puzzle:
    """A list of words, most of them once; those that are said several times are asked for.

    The list is spread over the whole text, so that `depth` plays no part.
    """
    chosen = random.sample(NOUNS, COMMON + RARE)
    said = [word for word in chosen[:COMMON] for _ in range(TIMES)] + chosen[COMMON:]
    random.shuffle(said)
    inserts = [
        (number / len(said), f"Word {number}: {word}.") for number, word in enumerate(said, 1)
    ]
    return Puzzle(
        inserts,
        "Numbered words are scattered over this text. Some of them occur several times.",
        f"Which {COMMON} of the numbered words occur most often?",
        "The words that occur most often are:",
        tuple(chosen[:COMMON]),
    )


def copy(random: Random, depth: float, words: Sequence[str]) -> Puzzle:
    """A passage, other text, and then: repeat the passage. `words`: those of the passage."""
    return Puzzle(
        [(depth, f"Passage: {' '.join(words)} End of the passage.")],
        "This text contains a passage that you will be asked to repeat.",
        "Repeat the passage word for word.",
        f"Passage: {' '.join(words[:GIVEN])}",
        tuple(words[GIVEN:]),
        in_order=True,
    )


TASKS: dict[str, Callable[[Random, float, Sequence[str]], Puzzle]] = {
    "needle": needle,
    "multikey": multikey,
    "multivalue": multivalue,
    "variables": variables,
    "words": common_words,
    "copy": copy,
}


def score(puzzle: Puzzle, written: str) -> float:
    """The share of the right answers that were written, from 0 to 1.

    Whole words: 4817 is not in 14817, but is in "4,817". Of a passage only what precedes the first
    mistake counts.
    """
    said = _words(written)
    if puzzle.in_order:
        right = _words(" ".join(puzzle.answers))
        pairs = zip(right, said, strict=False)
        wrong = next((i for i, (want, got) in enumerate(pairs) if want != got), None)
        return (min(len(right), len(said)) if wrong is None else wrong) / len(right)
    return sum(answer.casefold() in said for answer in puzzle.answers) / len(puzzle.answers)


def check_tasks(names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise PruneError(f"task {unknown[0]!r} is unknown; there are {', '.join(known)}")


def _words(text: str) -> list[str]:
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    return [word.casefold() for word in re.findall(r"\w+", plain)]


def _distinct(random: Random, count: int) -> list[str]:
    return [str(number) for number in random.sample(range(1000, 10_000), count)]


def _names(random: Random, count: int) -> list[str]:
    letters = "ABCDEFGHJKLMNPQRSTUVWXYZ"
    names: list[str] = []
    while len(names) < count:
        name = "".join(random.choices(letters, k=3))
        if name not in names and name != "VAR":
            names.append(name)
    return names
