"""Perplexity, KL and equal tokens of pruned SmolLM2 on held-out text, by context and strength.

    python -m experiments.smollm2.quality MODEL ADAPTER... --book FILE --news FILE --wikitext FILE

Dense, ours, and policies without training with as many slots as ours holds at that context, mean
over layers. At context n every text is read in windows of n tokens that overlap by half, and tokens
with a context of n/2 to n count: the same tokens for each method and for each n. A policy holds its
budget from there on, ours fewer tokens earlier in the window: the comparison favours the policies.
TOVA and H2O read token by token, as their cache does (tests/evaluate/test_perplexity.py). SnapKV
reads parts of a sixteenth of the window through its cache and is cut to the budget after each: it
sees up to a part more.
It resumes where it stopped; rows in docs/results/smollm2.json, or another --name.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.publish import publish, save_figure
from experiments.smollm2 import common
from experiments.smollm2.common import DENSE, METHODS, POLICIES, Row, Subject, table
from kvprune import Pruned
from kvprune.errors import PruneError
from kvprune.evaluate.perplexity.measure import DenseLogits, perplexity
from kvprune.evaluate.text_file import read_text
from kvprune.text.windows import Windows, cut
from kvprune.utils import plot as drawing
from kvprune.utils.parse import numbers

TEXTS = ("wikitext", "book", "news")
COLUMNS = ("method", "strength", "text", "context", "sparsity", "perplexity", "kl", "match")
# tokens that are read at once; half of them have logits in memory, 49,152 numbers each, and the
# dense model's as well. TOVA and H2O step all rows together, so few large batches are fast
AT_ONCE = 8192
FAR = 1.5  # of dense: off the figure


def main() -> None:
    parser = common.arguments(__doc__)
    for name in TEXTS:
        parser.add_argument(f"--{name}", type=Path, help="a text file, .txt or .txt.gz")
    parser.add_argument("--contexts", default="256,512,1024,2048")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per text that count")
    parser.add_argument(
        "--longest", type=int, help="predict the tokens of a run with this largest context"
    )
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--policies-at", help="contexts of the policies; all by default")
    parser.add_argument("--name", default="smollm2", help="name of the rows and the figure")
    args = parser.parse_args()
    rows, about = run(args)
    kept = [{name: row[name] for name in COLUMNS} for row in rows]
    publish(args.name, about, kept, args.docs)
    show(kept)
    if any(row["method"] in POLICIES for row in kept):
        draw(kept, numbers(args.contexts, int, "--contexts"), args.name, args.docs)


def run(args: argparse.Namespace) -> tuple[list[Row], Row]:
    contexts = sorted(numbers(args.contexts, int, "--contexts"))
    longest = args.longest or contexts[-1]
    subject = common.subject(args)
    points = common.points(args, "quality", tokens=args.tokens)
    rows: list[Row] = []
    # short contexts first: early results
    for context in contexts:
        methods = common.chosen_at(args, context)
        for text in (name for name in TEXTS if getattr(args, name)):
            ids = tokens(subject, getattr(args, text), longest // 2 + args.tokens + 1)
            windows = halves(ids, context, longest, args.tokens)
            where = {"text": text, "context": context, "windows": windows.digest()}
            measure = partial(measured, windows=windows, dense_logits={})
            for (row,) in common.compared(subject, methods, points, where, measure, held):
                print(line(row), flush=True)
                rows.append(row)
    about = {"model": str(args.model), "tokens": args.tokens, "contexts": contexts}
    return rows, {**about, "adapters": [adapter.name for adapter in subject.adapters]}


def tokens(subject: Subject, file: Path, count: int) -> torch.Tensor:
    # a book is long; a token has about four characters
    text = read_text(file)[: 12 * count]
    ids = torch.tensor(subject.tokenizer(text, verbose=False).input_ids[:count])
    if len(ids) < count:
        raise PruneError(f"{file} has {len(ids)} tokens, {count} are needed; lower --tokens")
    return ids


def halves(ids: torch.Tensor, context: int, longest: int, count: int) -> Windows:
    """Windows of `context` tokens, the second half of each to be predicted.

    They start such that the same `count` tokens are predicted at every context.
    """
    half = context // 2
    if context % 2 or count % (longest // 2):
        raise PruneError(
            f"{count} tokens cannot be cut into halves of {longest} and {context}; choose contexts "
            f"that are powers of two, and a multiple of {longest // 2} as --tokens"
        )
    start = longest // 2 - half
    return cut(ids[start : start + half + count + 1], context, half)


def held(rows: list[Row]) -> float:
    """Tokens in a layer of ours after the last of a window, including that one."""
    return 1 + (1 - rows[0]["sparsity"]) * (rows[0]["context"] - 1)


def measured(pruned: Pruned, windows: Windows, dense_logits: DenseLogits) -> list[Row]:
    path = "cached" if pruned.config.cuts_prompts else "full"
    at = perplexity(
        pruned, windows, [windows.length], dense="open", dense_logits=dense_logits, path=path,
        chunk=part_of(windows.length),
        batch=max(1, AT_ONCE // windows.length), progress=False,
    )[0]  # fmt: skip
    return [{
        "sparsity": at.sparsity, "perplexity": at.perplexity, "kl": at.kl, "match": at.same,
        "dense_perplexity": at.dense_perplexity, "counted": at.tokens,
    }]  # fmt: skip


def part_of(context: int) -> int:
    """How many tokens SnapKV reads before it is cut to its budget."""
    return max(2, context // 16)


def line(row: Row) -> str:
    ratio = row["perplexity"] / row["dense_perplexity"]
    return (
        f"{row['text']:9} {row['context']:5}  {common.named(row):24} "
        f"{row['sparsity']:6.1%} pruned  perplexity {row['perplexity']:7.3f} "
        f"({ratio:.4f} of dense)  KL {row['kl']:.4f}  same {row['match']:.1%}"
    )


def by_dense(rows: list[Row]) -> dict[tuple[str, int], float]:
    return {(r["text"], r["context"]): r["perplexity"] for r in rows if r["method"] == DENSE}


def show(rows: list[Row]) -> None:
    dense = by_dense(rows)
    lines = []
    for row in rows:
        base = dense.get((row["text"], row["context"]))
        ratio = "" if base is None else f"{row['perplexity'] / base - 1:+.1%}"
        lines.append([row["text"], str(row["context"]), row["method"], row["strength"] or "",
                      f"{row['sparsity']:.1%}", f"{row['perplexity']:.2f}", ratio,
                      f"{row['kl']:.4f}", f"{row['match']:.1%}"])  # fmt: skip
    table(["text", "context", "method", "strength", "pruned", "perplexity", "against dense", "KL",
           "same token"], lines)  # fmt: skip


def draw(rows: list[Row], contexts: list[int], name: str, docs: Path) -> None:
    """One panel per text and context: perplexity / dense against the share that is pruned."""
    dense = by_dense(rows)
    shown = [n for n in contexts if n >= 1024] or [max(contexts)]
    keys = [key for n in shown for key in dense if key[1] == n]
    if not keys:
        return
    figure, axes = drawing.panels([f"{text}, context {n:,}" for text, n in keys])
    for axis, key in zip(axes, keys, strict=True):
        drawing.level(axis, 1.0)
        for number, method in enumerate(METHODS[1:], 1):
            own = [r for r in rows if r["method"] == method and (r["text"], r["context"]) == key]
            pairs = sorted((100 * r["sparsity"], r["perplexity"] / dense[key]) for r in own)
            if pairs:
                pruned, ratio = zip(*pairs, strict=True)
                drawing.line(axis, number, pruned, ratio, method)
        axis.set(xlabel="context pruned, %", ylabel="perplexity / dense")
        cut_off(axis, [r for r in rows if (r["text"], r["context"]) == key], dense[key])
    drawing.legend_above(figure, axes[0])
    save_figure(figure, name, docs)


def cut_off(axis: Any, rows: list[Row], dense: float) -> None:
    """Cut off methods far above the rest, usually local attention, and note their range."""
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["method"], []).append(row["perplexity"] / dense)
    far = {name: values for name, values in ratios.items() if min(values) > FAR}
    near = max(value for name, values in ratios.items() if name not in far for value in values)
    if far and near < FAR:
        axis.set_ylim(1 - 0.2 * (near - 1), 1 + 1.2 * (near - 1))
        labels = [f"{name}: {min(v):.1f} to {max(v):.1f}" for name, v in far.items()]
        axis.text(0.98, 0.03, ", ".join(labels) + ", above", transform=axis.transAxes, ha="right",
                  color=drawing.MUTED, fontsize=8.5)  # fmt: skip


if __name__ == "__main__":
    main()
