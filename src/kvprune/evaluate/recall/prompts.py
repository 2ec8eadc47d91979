"""Puzzles as prompts of an exact number of tokens, in the model's chat template if it has one."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from kvprune.errors import PruneError
from kvprune.evaluate.recall.tasks import PASSAGE, TASKS, Puzzle

SENTENCE = 24  # tokens within which the end of a sentence is looked for
MARK = "\0"


@dataclass(frozen=True)
class Prompt:
    """The tokens to read, the right answer as tokens, and the puzzle to score what is written."""

    ids: list[int]
    right: list[int]
    puzzle: Puzzle
    depth: float
    sample: int

    @property
    def most(self) -> int:
        """Tokens to write: half as many again as the right answer, so that talk finds room."""
        return len(self.right) + len(self.right) // 2 + 8


class Haystack:
    """Text to hide things in, as tokens, with the ends of its sentences."""

    def __init__(self, tokenizer: Any, text: str, chat: bool | None = None):
        self.tokenizer = tokenizer
        if chat and not tokenizer.chat_template:
            raise PruneError("the tokenizer has no chat template; leave out --chat")
        self.chat = bool(tokenizer.chat_template) if chat is None else chat
        self.ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        pieces = tokenizer.convert_ids_to_tokens(self.ids)
        self.ends = [i for i, piece in enumerate(pieces, 1) if piece.endswith((".", "!", "?"))]
        self.digest = hashlib.sha256(repr(self.ids).encode()).hexdigest()[:12]

    def prompt(self, task: str, context: int, depth: float, sample: int, seed: int = 0) -> Prompt:
        """The `sample`-th prompt of `context` tokens; the same for every model of a tokenizer."""
        random = Random(f"{task} {context} {depth} {sample} {seed}")
        puzzle = TASKS[task](random, depth, self._passage(random))
        before, after = self._frame(puzzle)
        placed = sorted(((place, self.encoded(" " + text)) for place, text in puzzle.inserts),
                        key=lambda pair: pair[0])  # fmt: skip
        used = len(before) + len(after) + sum(len(ids) for _, ids in placed)
        room = context - used
        if room < 0:
            raise PruneError(
                f"task {task} needs {used} tokens with this tokenizer, and a context has "
                f"{context}; use longer contexts, or other tasks"
            )
        if len(self.ids) <= room:
            raise PruneError(
                f"the text has {len(self.ids)} tokens, {room + 1} are needed to hide things in; "
                f"pass a longer one"
            )
        start = random.randrange(len(self.ids) - room)
        ids, done = [*before], 0
        for place, insert in placed:
            stop = max(done, self._sentence_end(start, round(place * room)))
            ids += [*self.ids[start + done : start + stop], *insert]
            done = stop
        ids += [*self.ids[start + done : start + room], *after]
        assert len(ids) == context, "the text fills what is left"
        right = self.encoded(" " + _said(puzzle))
        return Prompt(ids, right, puzzle, depth, sample)

    def window(self, context: int, random: Random) -> list[int]:
        """Plain text of `context` tokens."""
        if len(self.ids) <= context:
            raise PruneError(
                f"the text has {len(self.ids)} tokens, {context + 1} are needed; pass a longer one"
            )
        start = random.randrange(len(self.ids) - context)
        return self.ids[start : start + context]

    def encoded(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return ids

    def _passage(self, random: Random) -> Sequence[str]:
        """Consecutive words of the text; those of the passage, wherever the text begins."""
        count = 40 * PASSAGE
        start = random.randrange(max(1, len(self.ids) - count))
        words = self.tokenizer.decode(self.ids[start : start + count]).split()
        passage: list[str] = words[1 : 1 + PASSAGE]
        return passage

    def _frame(self, puzzle: Puzzle) -> tuple[list[int], list[int]]:
        """The tokens before and after the text, the beginning of the answer included."""
        message = f"{puzzle.instruction}\n\n{MARK}\n\n{puzzle.question}"
        if self.chat:
            framed = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
            )
        else:
            framed = f"{message}\n"
        before, after = framed.split(MARK)
        return self.encoded(before), self.encoded(after + puzzle.opening)

    def _sentence_end(self, start: int, place: int) -> int:
        """The last end of a sentence at or before a place, if one is near."""
        number = bisect_right(self.ends, start + place)
        end = self.ends[number - 1] - start if number else -1
        return end if end >= max(0, place - SENTENCE) else place


def _said(puzzle: Puzzle) -> str:
    return (" " if puzzle.in_order else ", ").join(puzzle.answers)
