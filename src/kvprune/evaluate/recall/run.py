"""Recall of a model by name, next to the dense one and to policies of its size; resumable."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from transformers import PreTrainedModel

from kvprune import tiny
from kvprune.adapters.load import Loaded, load_with_tokenizer
from kvprune.config import to_dict
from kvprune.errors import PruneError
from kvprune.evaluate.dense import dense_reference, identity
from kvprune.evaluate.points import Points, Row
from kvprune.evaluate.reader import Reader
from kvprune.evaluate.recall import repeats
from kvprune.evaluate.recall.figure import draw
from kvprune.evaluate.recall.measure import Plan, recall, summary
from kvprune.evaluate.recall.prompts import Haystack
from kvprune.evaluate.recall.tasks import TASKS, check_tasks
from kvprune.evaluate.recall.writer import Writer
from kvprune.evaluate.text_file import read_text
from kvprune.evaluate.throughput.budgets import budgeted
from kvprune.integration.handle import Pruned, attach
from kvprune.integration.host import max_positions
from kvprune.utils import plot
from kvprune.utils.files import write_atomically
from kvprune.version import __version__

NAME = "recall"
REPEATS = "repeats"
ALL_TASKS = (*TASKS, REPEATS)
CONTEXTS = (256, 512, 1024)
ROOM = 96  # tokens that an answer may need


@dataclass(frozen=True)
class Measured:
    """Means by side, task, context and depth; repeated text by class; how it was measured."""

    about: dict[str, Any]
    rows: list[Row]
    repeats: list[Row] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"about": self.about, "rows": self.rows, "repeats": self.repeats}


def run(
    model: str,
    *,
    adapter: str | None = None,
    tasks: Sequence[str] = ALL_TASKS,
    contexts: Sequence[int] | None = None,
    depths: Sequence[float] = (0.1, 0.5, 0.9),
    samples: int = 10,
    text: Path | None = None,
    policies: Sequence[str] = (),
    budget: float | None = None,
    dense: bool = True,
    dense_model: str | None = None,
    chat: bool | None = None,
    seed: int = 0,
    batch: int = 4,
    dtype: str = "auto",
    device: str | None = None,
    out: str | Path | None = None,
) -> Measured:
    """Ask the model, then the dense one, then policies that hold as many tokens.

    `out` gets recall.json, .png and .svg, and .points.json on the way, with every prompt's answer.
    """
    check_tasks(tasks, ALL_TASKS)
    if out is not None:
        plot.need_matplotlib()
    loaded = load_with_tokenizer(model, adapter, dtype, device)
    prunes = isinstance(loaded.model, Pruned) and loaded.model.config.prunes
    _check(policies, budget, prunes, depths)
    wanted = dense or bool(policies)
    reference = dense_reference(loaded, dense_model, dtype, device) if wanted else None
    haystack = Haystack(loaded.tokenizer, read_text(text or tiny.text_file("held_out")), chat)
    plan = Plan(
        tuple(task for task in tasks if task != REPEATS),
        _contexts(loaded, contexts), tuple(depths), samples, seed, batch,
    )  # fmt: skip
    about = {
        "model": model,
        "adapter": adapter,
        "method": to_dict(loaded.model.config) if isinstance(loaded.model, Pruned) else None,
        "weights": identity(loaded.host),
        "dense": identity(reference) if isinstance(reference, PreTrainedModel) else reference,
        "text": haystack.digest,
        "chat": haystack.chat,
        "samples": samples,
        "seed": seed,
        "version": __version__,
    }
    folder = None if out is None else Path(out)
    points = Points(None if folder is None else folder / f"{NAME}.points.json", about)
    asked = Asked(loaded, haystack, plan, points, REPEATS in tasks)
    for side in _sides(asked, reference, prunes, dense, policies, budget):
        asked.ask(*side)
    rows, repeated = summary(asked.rows), repeats.summary(asked.repeated)
    measured = Measured({**about, "tasks": list(tasks), "depths": list(depths)}, rows, repeated)
    if folder is not None:
        text_out = json.dumps(measured.to_dict(), indent=1, ensure_ascii=False)
        write_atomically(folder / f"{NAME}.json", text_out.encode())
        plot.save(draw(rows, repeated, adapter or model), folder / NAME)
    return measured


@dataclass
class Asked:
    """What has been asked so far, and how."""

    loaded: Loaded
    haystack: Haystack
    plan: Plan
    points: Points
    with_repeats: bool
    rows: list[Row] = field(default_factory=list)
    repeated: list[Row] = field(default_factory=list)

    def ask(
        self,
        side: str,
        model: PreTrainedModel | Pruned,
        gates_open: bool = False,
        about: Row | None = None,
        only: tuple[str, int] | None = None,
    ) -> None:
        """All prompts, or those of one task and context."""
        writer = Writer(model, gates_open, self.loaded.tokenizer.eos_token_id)
        cells = [cell for cell in self.plan.cells() if only in (None, cell[:2])]
        if cells:
            self.rows += recall(writer, side, self.haystack, self.plan, self.points, about, cells)
        contexts = [n for n in self.plan.contexts if only in (None, (REPEATS, n))]
        if self.with_repeats and contexts:
            self.repeated += repeats.measure_repeats(
                Reader(model, gates_open), side, self.haystack, contexts, self.plan.samples,
                self.points, self.plan.seed, about,
            )  # fmt: skip

    def held(self, task: str, context: int) -> int:
        """Tokens in a layer of the pruned model after what it read."""
        if task == REPEATS:
            own = [row["dropped"] for row in self.repeated if _is_own(row, task, context)]
            return round(context * (1 - fmean(own)))
        return round(fmean(row["kept"] for row in self.rows if _is_own(row, task, context)))


def _sides(
    asked: Asked,
    reference: PreTrainedModel | str | None,
    prunes: bool,
    dense: bool,
    policies: Sequence[str],
    budget: float | None,
) -> Iterator[tuple[Any, ...]]:
    """The pruned model first: policies hold as many tokens. They come last, on the dense one."""
    loaded = asked.loaded
    yield ("pruned" if prunes else "dense"), loaded.model
    if dense and reference == "open":
        yield "dense", loaded.model, True
    elif dense and isinstance(reference, PreTrainedModel):
        yield "dense", reference
    if not policies:
        return
    if isinstance(loaded.model, Pruned) and not isinstance(reference, PreTrainedModel):
        loaded.model.detach()
    host = reference if isinstance(reference, PreTrainedModel) else loaded.host
    tasks = [*asked.plan.tasks, *([REPEATS] if asked.with_repeats else [])]
    for policy in policies:
        for task in tasks:
            for context in asked.plan.contexts:
                kept = _kept(budget, context) if budget else asked.held(task, context)
                with attach(host, budgeted(policy, max(2, kept), context)) as attached:
                    yield policy, attached, False, {"budget": kept}, (task, context)


def _kept(budget: float, context: int) -> int:
    return round(budget * context) if budget < 1 else round(budget)


def _is_own(row: Row, task: str, context: int) -> bool:
    return (row["side"], row["task"], row["context"]) == ("pruned", task, context)


def _contexts(loaded: Loaded, chosen: Sequence[int] | None) -> tuple[int, ...]:
    limit = max_positions(loaded.host)
    if chosen is None:
        fits = [n for n in CONTEXTS if limit is None or n + ROOM <= limit]
        chosen = fits or [CONTEXTS[0]]
    if limit is not None and max(chosen) + ROOM > limit:
        raise PruneError(
            f"a context of {max(chosen)} tokens and {ROOM} for the answer do not fit into the "
            f"{limit} positions of {loaded.name}; lower --contexts"
        )
    return tuple(sorted(set(chosen)))


def _check(
    policies: Sequence[str], budget: float | None, prunes: bool, depths: Sequence[float]
) -> None:
    for policy in policies:
        budgeted(policy, 64, 256)
    if policies and budget is None and not prunes:
        raise PruneError(
            "a dense model sets no size for policies; pass --budget, tokens or a share such as 0.2"
        )
    if budget is not None and budget <= 0:
        raise PruneError(f"budget={budget} must be a number of tokens, or a share below 1")
    if wrong := [depth for depth in depths if not 0 <= depth <= 1]:
        raise PruneError(f"depth {wrong[0]} must be from 0, the beginning of the text, to 1")
