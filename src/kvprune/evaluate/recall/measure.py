"""Tasks × contexts × depths: the score of each prompt, and means with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from tqdm import tqdm

from kvprune.evaluate.points import Points, Row
from kvprune.evaluate.recall.prompts import Haystack, Prompt
from kvprune.evaluate.recall.tasks import score
from kvprune.evaluate.recall.writer import Writes
from kvprune.utils.intervals import wilson

ALL = "all"


@dataclass(frozen=True)
class Plan:
    """What is asked: the same prompts for every model with the same tokenizer."""

    tasks: tuple[str, ...]
    contexts: tuple[int, ...]  # tokens of a prompt
    depths: tuple[float, ...]
    samples: int  # prompts of each task, context and depth
    seed: int = 0
    batch: int = 4

    def cells(self) -> list[tuple[str, int, float]]:
        return [(t, n, d) for t in self.tasks for n in self.contexts for d in self.depths]


def recall(
    writer: Writes,
    side: str,
    haystack: Haystack,
    plan: Plan,
    points: Points,
    about: Row | None = None,
    cells: Iterable[tuple[str, int, float]] | None = None,
    progress: bool = True,
) -> list[Row]:
    """One row per prompt: its score, the likelihood of the right answer, tokens kept, the words."""
    rows: list[Row] = []
    chosen = plan.cells() if cells is None else list(cells)
    for task, context, depth in tqdm(chosen, side, unit=" cells", disable=None if progress else 1):
        setting = {"side": side, "task": task, "context": context, "depth": depth, **(about or {})}

        def measure(task: str = task, context: int = context, depth: float = depth) -> list[Row]:
            numbers = range(plan.samples)
            prompts = [haystack.prompt(task, context, depth, n, plan.seed) for n in numbers]
            return list(_answers(writer, haystack, prompts, plan.batch))

        rows += points.measure(setting, measure)
    return rows


def _answers(
    writer: Writes, haystack: Haystack, prompts: Sequence[Prompt], batch: int
) -> Iterable[Row]:
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        ids = torch.tensor([prompt.ids for prompt in part])
        written = writer.write(
            ids, max(prompt.most for prompt in part), [prompt.right for prompt in part]
        )
        for prompt, tokens, log_p, kept in zip(
            part, written.tokens, written.log_p, written.kept, strict=True
        ):
            # each has its own room, whatever else is in the batch
            text = haystack.tokenizer.decode(tokens[: prompt.most], skip_special_tokens=True)
            yield {
                "sample": prompt.sample,
                "score": score(prompt.puzzle, text),
                "log_p": log_p,
                "kept": kept,
                "written": text,
            }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Means by side, task, context and depth, and over depths; intervals are Wilson's."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        for depth in (row["depth"], ALL):
            key = (row["side"], row["task"], row["context"], depth)
            groups.setdefault(key, []).append(row)
    return [_mean(key, group) for key, group in groups.items()]


def _mean(key: tuple[Any, ...], group: list[Row]) -> Row:
    side, task, context, depth = key
    share, n = fmean(row["score"] for row in group), len(group)
    low, high = wilson(share, n)
    return {
        "side": side, "task": task, "context": context, "depth": depth, "n": n, "score": share,
        "low": low, "high": high, "log_p": fmean(row["log_p"] for row in group),
        "sparsity": 1 - fmean(row["kept"] for row in group) / context,
    }  # fmt: skip
