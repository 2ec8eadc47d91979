"""A fact in a long text, a question at its end: does a pruned SmolLM2 still find it?

    python -m experiments.smollm2.needle MODEL ADAPTER... --text held_out_book.txt

The fact ("The secret number of the city of Lyon is 4817.") is at one of several depths of a filler
text; the user asks for it, in the model's chat template, and the answer's first words are given.
Two scores per prompt: `found`, whether the greedy answer contains the number, and `better`, the
share of wrong numbers that the model finds less likely than the right one (chance: 0.5), which is
informative even if no answer is right. Policies hold as many tokens as ours does after
reading prompts of that length, mean over layers and prompts.
It resumes where it stopped; rows in docs/results/smollm2_needle.json.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from experiments.publish import publish, save_figure
from experiments.smollm2 import common
from experiments.smollm2.common import DENSE, METHODS, Row, table
from kvprune import Pruned, PrunedCache
from kvprune.errors import PruneError
from kvprune.evaluate.text_file import read_text
from kvprune.utils import plot as drawing
from kvprune.utils.parse import numbers

CITIES = ("Lyon", "Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Dublin", "Prague", "Havana")
FACT = "The secret number of the city of {city} is {number}."
QUESTION = "What is the secret number of the city of {city}?"
ANSWER = "The secret number of the city of {city} is"
TASK = "Somewhere in this text a secret number is hidden. Remember it.\n\n{text}\n\n{question}"
WRONG, MOST = 15, 8  # wrong numbers to choose from; tokens of a greedy answer
AT_ONCE = 5  # prompts
ROW = ("method", "strength", "context", "depth", "seed", "found", "better", "log_p", "kept", "seen")


@dataclass(frozen=True)
class Prompt:
    """A prompt, the right answer and wrong ones, as tokens."""

    ids: list[int]
    number: str
    choices: list[list[int]]  # the right one first
    depth: float
    seed: int


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="the filler: .txt or .txt.gz")
    parser.add_argument("--contexts", default="256,512,1024,2000")
    parser.add_argument("--depths", default="0.1,0.3,0.5,0.7,0.9")
    parser.add_argument("--seeds", type=int, default=4, help="prompts at each depth")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--policies-at", help="contexts of the policies; all by default")
    args = parser.parse_args()
    rows = run(args)
    about = {"model": str(args.model), "fact": FACT, "question": QUESTION, "wrong": WRONG}
    means = summary(rows)
    publish("smollm2_needle", about, means, args.docs)
    show(means)
    draw(means, args.docs)


def run(args: argparse.Namespace) -> list[Row]:
    subject = common.subject(args)
    depths = numbers(args.depths, float, "--depths")
    points = common.points(args, "needle", depths=depths, seeds=args.seeds, fact=FACT, task=TASK)
    filler = subject.tokenizer(read_text(args.text)[:2_000_000], verbose=False).input_ids
    rows: list[Row] = []
    for context in sorted(numbers(args.contexts, int, "--contexts")):
        methods = common.chosen_at(args, context)
        prompts = list(all_prompts(subject.tokenizer, filler, context, depths, args.seeds))
        measure = partial(ask_all, tokenizer=subject.tokenizer, prompts=prompts)
        # another filler, another measurement
        where = {"context": context, "prompts": digest(prompts)}
        for measured in common.compared(subject, methods, points, where, measure, held):
            print(line(measured), flush=True)
            rows += measured
    return rows


def digest(prompts: list[Prompt]) -> str:
    return hashlib.sha256(repr([prompt.ids for prompt in prompts]).encode()).hexdigest()[:12]


def all_prompts(
    tokenizer: Any, filler: list[int], context: int, depths: list[float], seeds: int
) -> Iterator[Prompt]:
    for seed in range(seeds):
        for depth in depths:
            yield make_prompt(tokenizer, filler, context, depth, seed)


def make_prompt(tokenizer: Any, filler: list[int], context: int, depth: float, seed: int) -> Prompt:
    """A prompt of `context` tokens."""
    random = Random(f"{context} {depth} {seed}")
    city = random.choice(CITIES)
    values = random.sample(range(1000, 10_000), 1 + WRONG)
    named = {"city": city, "number": values[0]}
    question = QUESTION.format(**named)
    frame = chat_prompt(tokenizer, TASK.format(text="\0", question=question))
    before, after = frame.split("\0")
    fact = encoded(tokenizer, " " + FACT.format(**named))
    opening = encoded(tokenizer, before)
    closing = encoded(tokenizer, after + ANSWER.format(**named))
    room = context - len(opening) - len(closing) - len(fact)
    if room < 16:
        raise PruneError(
            f"a context of {context} tokens leaves {room} for the text; use a longer one"
        )
    start = random.randrange(len(filler) - room)
    position = round(depth * room)
    hay = filler[start : start + room]
    choices = [encoded(tokenizer, f" {value}") for value in values]
    ids = [*opening, *hay[:position], *fact, *hay[position:], *closing]
    return Prompt(ids, str(values[0]), choices, depth, seed)


def chat_prompt(tokenizer: Any, message: str) -> str:
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    return text


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def ask_all(
    pruned: Pruned, tokenizer: Any, prompts: list[Prompt], chunk: int | None = None, **options: Any
) -> list[Row]:
    groups = (prompts[start : start + AT_ONCE] for start in range(0, len(prompts), AT_ONCE))
    return [row for group in groups for row in ask(pruned, tokenizer, group, chunk, **options)]


def held(rows: list[Row]) -> float:
    """Tokens in a layer of ours after a prompt."""
    return mean(rows, "kept")


def ask(
    pruned: Pruned, tokenizer: Any, prompts: list[Prompt], chunk: int | None = None, **options: Any
) -> list[Row]:
    """Read prompts of one length; then decode greedily, and score each choice.

    They are read at once, or `chunk` tokens at a time; `options` are those of the cache.
    """
    cache = PrunedCache(pruned, **options)
    ids = torch.tensor([prompt.ids for prompt in prompts])
    for part in ids.split(chunk or ids.shape[1], 1):
        first = step(pruned, cache, part, keep=1)[:, -1]  # (B, V)
    kept, seen = cache.kept.float().mean(0), cache.seen
    likely = []
    for row, prompt in enumerate(prompts):
        own = copy.deepcopy(cache)
        own.batch_select_indices(torch.tensor([row]))
        likely.append(likelihoods(pruned, own, first[row : row + 1], prompt.choices))
    written, token = [], first.argmax(-1)
    for _ in range(MOST):
        written.append(token)
        token = step(pruned, cache, token[:, None])[:, -1].argmax(-1)
    answers = tokenizer.batch_decode(torch.stack(written, 1))
    return [
        {
            "depth": prompt.depth, "seed": prompt.seed, "kept": float(tokens), "seen": seen,
            "found": prompt.number in answer.replace(",", ""),
            "better": int((log_p[1:] < log_p[0]).sum()) / (len(log_p) - 1),
            "log_p": float(log_p[0]),
        }
        for prompt, answer, log_p, tokens in zip(prompts, answers, likely, kept, strict=True)
    ]  # fmt: skip


def likelihoods(
    pruned: Pruned, cache: PrunedCache, first: Tensor, choices: list[list[int]]
) -> Tensor:
    """The log-probability of each choice after what the cache has read: (choices,)."""
    length = max(map(len, choices))
    # shorter ones are padded on the right, which their tokens do not see
    ids = torch.tensor([[*choice, *choice[:1] * (length - len(choice))] for choice in choices])
    real = torch.tensor([[1.0] * len(c) + [0.0] * (length - len(c)) for c in choices])
    cache.batch_repeat_interleave(len(choices))
    logits = [first.expand(len(choices), -1)[:, None]]
    if length > 1:
        logits.append(step(pruned, cache, ids[:, :-1]))
    log_p = torch.cat(logits, 1).float().log_softmax(-1)  # (choices, length, V)
    return (log_p.gather(-1, ids[..., None])[..., 0] * real).sum(-1)


def step(pruned: Pruned, cache: PrunedCache, ids: Tensor, keep: int = 0) -> Tensor:
    out: Any = pruned.model(
        input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=keep
    )
    logits: Tensor = out.logits
    return logits


def mean(rows: list[Row], name: str) -> float:
    return sum(float(row[name]) for row in rows) / len(rows)


def line(rows: list[Row]) -> str:
    row, gone = rows[0], 1 - mean(rows, "kept") / mean(rows, "seen")
    return (
        f"{row['context']:5}  {common.named(row):24} {gone:6.1%} pruned  "
        f"found {mean(rows, 'found'):6.1%}  better than {mean(rows, 'better'):6.1%} of wrong ones  "
        f"log p {mean(rows, 'log_p'):.2f}"
    )


def summary(rows: list[Row]) -> list[Row]:
    """One row per method, strength, context and depth: means over prompts."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = tuple(row[name] for name in ("method", "strength", "context", "depth"))
        groups.setdefault(key, []).append(row)
    return [
        {
            **dict(zip(ROW[:4], key, strict=True)), "prompts": len(group),
            "sparsity": 1 - mean(group, "kept") / mean(group, "seen"),
            **{name: mean(group, name) for name in ("found", "better", "log_p")},
        }
        for key, group in groups.items()
    ]  # fmt: skip


def over_depths(means: list[Row]) -> dict[tuple[str, Any, int], Row]:
    groups: dict[tuple[str, Any, int], list[Row]] = {}
    for row in means:
        groups.setdefault((row["method"], row["strength"], row["context"]), []).append(row)
    names = ("sparsity", "found", "better", "log_p")
    return {key: {name: mean(group, name) for name in names} for key, group in groups.items()}


def show(means: list[Row]) -> None:
    table(
        ["method", "strength", "context", "pruned", "found", "better than wrong ones", "log p"],
        [
            [method, strength or "", str(context), f"{row['sparsity']:.0%}", f"{row['found']:.0%}",
             f"{row['better']:.0%}", f"{row['log_p']:.2f}"]
            for (method, strength, context), row in over_depths(means).items()
        ],
    )  # fmt: skip


def draw(means: list[Row], docs: Path) -> None:
    """One panel per strength: numbers found by context."""
    overall = over_depths(means)
    strengths = list(dict.fromkeys(key[1] for key in overall if key[1])) or [None]
    figure, axes = drawing.panels([str(strength or "dense") for strength in strengths])
    for axis, strength in zip(axes, strengths, strict=True):
        for number, method in enumerate(METHODS):
            own = {key[2]: row for key, row in overall.items()
                   if key[:2] == (method, None if method == DENSE else strength)}  # fmt: skip
            if own:
                y = [100 * own[context]["found"] for context in sorted(own)]
                drawing.line(axis, number, sorted(own), y, method)
        axis.set(xlabel="tokens of the prompt", ylabel="numbers found, %", ylim=(-3, 103))
    drawing.legend(axes[0])
    save_figure(figure, "smollm2_needle", docs)


if __name__ == "__main__":
    main()
