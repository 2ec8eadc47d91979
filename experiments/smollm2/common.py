"""Shared by the measurements of SmolLM2: options, adapters, policies of equal size, tables."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

import kvprune
from experiments.publish import DOCS
from kvprune import DenseConfig, Pruned
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.errors import PruneError
from kvprune.evaluate.points import Points
from kvprune.evaluate.throughput.budgets import budgeted
from kvprune.utils.malloc import keep_memory
from kvprune.utils.parse import numbers
from kvprune.utils.quiet import quiet
from kvprune.version import __version__

DENSE, OURS = "dense", "ours"
POLICIES = ("streaming", "tova", "h2o", "snapkv", "keynorm", "local")
METHODS = (DENSE, OURS, *POLICIES)
Row = dict[str, Any]


class Adapter(NamedTuple):
    """One strength: the name of its folder; `digest` changes with any of its weights."""

    name: str
    folder: Path
    digest: str


class Subject(NamedTuple):
    """The base model, to which adapters and policies are attached in turn."""

    model: transformers.PreTrainedModel
    tokenizer: Any
    adapters: list[Adapter]

    @contextmanager
    def attached(
        self, method: str, adapter: Adapter | None = None, budget: int = 0
    ) -> Iterator[Pruned]:
        """The model with this method; a policy holds `budget` tokens per layer."""
        if method == OURS:
            assert adapter is not None
            pruned = kvprune.load(self.model, adapter.folder)
        elif method == DENSE:
            pruned = kvprune.attach(self.model, DenseConfig())
        else:
            pruned = kvprune.attach(self.model, budgeted(method, budget, budget))
        self.model.eval()
        with pruned, torch.inference_mode():
            yield pruned


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("model", help="smollm2-135m, a folder, or a name on the hub")
    parser.add_argument("adapters", nargs="*", type=Path, help="folders of kvprune train")
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"), help="finished points")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of results and figures")
    return parser


def subject(args: argparse.Namespace) -> Subject:
    quiet()
    keep_memory()
    adapters = [Adapter(folder.name, folder, digest(folder)) for folder in args.adapters]
    names = [adapter.name for adapter in adapters]
    if twice := {name for name in names if names.count(name) > 1}:
        raise PruneError(f"two adapters are called {twice.pop()}; rename one of the folders")
    return Subject(load_base(args.model, "float32"), load_tokenizer(args.model), adapters)


def digest(folder: Path) -> str:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise PruneError(f"{folder} holds no adapter; pass the folder that kvprune train wrote")
    hashed = hashlib.sha256()
    for file in files:
        hashed.update(file.read_bytes())
    return hashed.hexdigest()[:12]


def points(args: argparse.Namespace, name: str, **about: Any) -> Points:
    """Finished points, each stored as soon as it is measured."""
    known = {"version": __version__, "model": str(args.model)}
    return Points(args.runs / f"{name}.json", {**known, **about})


def compared(
    subject: Subject,
    methods: Sequence[str],
    points: Points,
    where: Row,
    measure: Callable[[Pruned], list[Row]],
    held: Callable[[list[Row]], float],
) -> Iterator[list[Row]]:
    """Rows of dense, then of each strength of ours and the policies of its size.

    `held`: from the rows of ours, how many tokens a layer holds; the policies hold as many. The
    `strength` of a policy is that of the adapter whose size it has.
    """
    runs: list[tuple[str, Adapter | None]] = [(DENSE, None)] if DENSE in methods else []
    for adapter in subject.adapters:
        # ours first: it sets the budget of the policies
        runs += [(method, adapter) for method in METHODS[1:] if method in (OURS, *methods)]
    budget = 0
    for method, adapter in runs:
        setting: Row = {"method": method, "strength": adapter and adapter.name, **where}
        setting |= {"adapter": adapter.digest} if adapter else {}
        setting |= {"budget": budget} if method in POLICIES else {}
        rows = points.measure(setting, partial(_with, subject, measure, method, adapter, budget))
        if method == OURS:
            budget = max(2, round(held(rows)))
        yield rows


def _with(
    subject: Subject,
    measure: Callable[[Pruned], list[Row]],
    method: str,
    adapter: Adapter | None,
    budget: int,
) -> list[Row]:
    with subject.attached(method, adapter, budget) as pruned:
        return measure(pruned)


def chosen_at(args: argparse.Namespace, context: int) -> list[str]:
    """--methods at this context: policies only if --policies-at lists it, by default at all."""
    with_policies = numbers(args.policies_at or args.contexts, int, "--policies-at")
    methods = chosen(args.methods)
    return [name for name in methods if name not in POLICIES or context in with_policies]


def chosen(text: str) -> list[str]:
    """--methods as a list."""
    methods = text.split(",")
    if unknown := [method for method in methods if method not in METHODS]:
        raise PruneError(f"method {unknown[0]!r} is unknown; there are {', '.join(METHODS)}")
    return methods


def named(row: Row) -> str:
    """Method and strength, for a line of progress."""
    return row["method"] if row["strength"] is None else f"{row['method']} ({row['strength']})"


def table(columns: list[str], rows: list[list[str]]) -> None:
    """Markdown, for docs/results.md."""
    for row in (columns, ["---"] * len(columns), *rows):
        print("| " + " | ".join(row) + " |")
