"""Does a change of context show? Pairs across it, against the same distances without a change.

    python -m experiments.context_switch --corpus fiction=FILE news=FILE travel=FILE
    python -m experiments.context_switch --corpus ... --model smollm2-135m --adapter smollm2-135m-80

The paper: the network "learned to ignore most of the preceding text if that comes from a different
context" (App. C, Fig. 15). Each document gives two halves of `--half` tokens that follow one
another, joined by an empty line. Three conditions: each second half after its own first half
(continued), after that of another document of the same kind, and after that of another kind. All
contain the same halves at the same positions, so that only the pairing differs: the control is
matched in text and distance. Measured: the share of pairs across the join that are still seen, by
layer, and its ratio to `continued`; intervals are 95 %, by bootstrap over second halves.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from experiments import small
from experiments.publish import DOCS, publish, save_figure
from kvprune import Pruned, PruningConfig
from kvprune.adapters.load import load_with_tokenizer
from kvprune.errors import PruneError
from kvprune.evaluate.points import Points
from kvprune.evaluate.reader import Reader
from kvprune.text.sources import find
from kvprune.utils import plot
from kvprune.utils.intervals import bootstrap
from kvprune.utils.quiet import quiet

CONTINUED, SAME_KIND, OTHER_KIND = "continued", "another document", "another kind"
CONDITIONS = (CONTINUED, SAME_KIND, OTHER_KIND)
BATCH = 4
Half = list[int]


def main() -> None:
    parser = small.arguments(__doc__)
    parser.add_argument("--corpus", nargs="+", required=True, metavar="KIND=FILE")
    parser.add_argument("--model", help="instead of γ = 0.3 of tiny_curve.py, both seeds")
    parser.add_argument("--adapter")
    parser.add_argument("--passages", type=int, default=60, help="of each kind")
    parser.add_argument("--half", type=int, default=128, help="tokens before and after the join")
    parser.add_argument("--name", default="context_switch")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    quiet()
    corpora = dict(part.split("=", 1) for part in args.corpus)
    if len(corpora) < 2:
        raise PruneError("one kind of text has no other one to change to; pass two or more")
    rows: list[dict[str, Any]] = []
    for name, model, adapter in models(args):
        loaded = load_with_tokenizer(model, adapter)
        tokenizer = loaded.tokenizer
        halves = {
            kind: list(islice(passages(source, tokenizer, args.half), args.passages))
            for kind, source in corpora.items()
        }
        for kind, found in halves.items():
            if len(found) < args.passages:
                raise PruneError(f"{kind} has {len(found)} passages, {args.passages} are wanted")
        about = {"model": model, "adapter": adapter, "half": args.half, "n": args.passages}
        points = Points(args.runs / "context_switch" / f"{args.name}-{name}.json", about)
        seen = measured(loaded.attached(), tokenizer, halves, points)
        rows += [{"model": name, **row} for row in compared(seen)]
        del loaded
    about = {"kinds": list(corpora), "passages of each": args.passages, "half": args.half}
    publish(args.name, about, rows, args.docs)
    print("\n".join(verdicts(rows)))
    draw(rows, args.name, args.docs)


def models(args: argparse.Namespace) -> list[tuple[str, str, str | None]]:
    if args.model:
        return [(str(args.adapter or args.model), args.model, args.adapter)]
    runs, method = small.Runs(args.runs), PruningConfig(rank=small.RANK)
    return [
        (f"tiny, seed {seed}", str(runs.run_folder(method, seed, gamma=0.3)), None)
        for seed in range(args.seeds)
    ]


def passages(source: str, tokenizer: Any, half: int) -> Any:
    """Two halves of a document, cut where a paragraph ends: the first before it, the second after.

    The paragraph is the first that leaves room for both.
    """
    for document in find(source).documents("text", None, True):
        parts = [part for part in document[: 100 * half].split("\n\n") if part.strip()]
        before: list[int] = []
        for number, part in enumerate(parts):
            before += tokenizer(part + "\n\n", add_special_tokens=False, verbose=False).input_ids
            if len(before) >= half:
                rest = "\n\n".join(parts[number + 1 :])
                after = tokenizer(rest, add_special_tokens=False, verbose=False).input_ids
                if len(after) >= half:
                    yield before[-half:], after[:half]
                break


def pairings(halves: dict[str, list[tuple[Half, Half]]]) -> dict[str, list[tuple[int, int]]]:
    """For each condition, which first half stands before each second half."""
    kinds = [kind for kind, found in halves.items() for _ in found]
    n = len(kinds)
    places = {kind: [i for i in range(n) if kinds[i] == kind] for kind in halves}
    random = Random(0)
    same: dict[int, int] = {}
    for own in places.values():
        # a cycle: nobody keeps his own, everybody is used once
        order = random.sample(own, len(own))
        same |= dict(zip(order, [*order[1:], order[0]], strict=True))
    # from the next kind: each first half is used once
    names = list(places)
    other = {
        i: j
        for kind, following in zip(names, [*names[1:], names[0]], strict=True)
        for i, j in zip(places[kind], random.sample(places[following], n // len(names)),
                        strict=True)
    }  # fmt: skip
    return {
        CONTINUED: [(i, i) for i in range(n)],
        SAME_KIND: [(same[i], i) for i in range(n)],
        OTHER_KIND: [(other[i], i) for i in range(n)],
    }


def measured(
    pruned: Pruned, tokenizer: Any, halves: dict[str, list[tuple[Half, Half]]], points: Points
) -> dict[str, np.ndarray]:
    """The share of pairs across the join still seen, by condition: (second halves, layers)."""
    everything = [pair for found in halves.values() for pair in found]
    reader = Reader(pruned)
    seen: dict[str, np.ndarray] = {}
    for condition, pairs in pairings(halves).items():
        shares: list[list[float]] = []
        for start in range(0, len(pairs), BATCH):
            part = pairs[start : start + BATCH]

            def measure(part: Sequence[tuple[int, int]] = part) -> list[dict[str, Any]]:
                ids = [[*everything[i][0], *everything[j][1]] for i, j in part]
                return [{"seen": row} for row in across(reader, torch.tensor(ids))]

            rows = points.measure({"condition": condition, "start": start}, measure)
            shares += [row["seen"] for row in rows]
        print(f"{condition}: {np.mean(shares):.1%} of the pairs across are seen", flush=True)
        seen[condition] = np.array(shares)
    return seen


def across(reader: Reader, ids: torch.Tensor) -> list[list[float]]:
    """Per row and layer: of all pairs of a later and an earlier half, the share still seen.

    Token j of the first half, dropped at step d, is seen by the d − half first of the second.
    """
    for _ in reader.read(ids):
        pass
    assert reader.drop_step is not None
    T = ids.shape[1]
    half = T // 2
    steps = reader.drop_step[..., :half].clamp(half, T) - half  # (L, B, half)
    shares: list[list[float]] = (steps.double().mean(-1) / (T - half)).T.tolist()
    return shares


def compared(seen: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Rows by condition and layer, and over layers."""
    rows = []
    layers = seen[CONTINUED].shape[1]
    for condition in CONDITIONS:
        for layer in range(layers + 1):
            own, base = (
                values.mean(1) if layer == layers else values[:, layer]
                for values in (seen[condition], seen[CONTINUED])
            )
            row: dict[str, Any] = {
                "condition": condition, "layer": "all" if layer == layers else layer,
                "n": len(own), "seen": float(own.mean()),
            }  # fmt: skip
            if condition != CONTINUED:
                pairs = list(zip(own.tolist(), base.tolist(), strict=True))
                low, high = bootstrap(pairs, ratio)
                row |= {"ratio": ratio(pairs), "low": low, "high": high}
            rows.append(row)
    return rows


def ratio(pairs: Sequence[tuple[float, float]]) -> float:
    own, base = (sum(column) for column in zip(*pairs, strict=True))
    return own / base if base else float("nan")


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for condition in CONDITIONS[1:]:
            own = [r for r in rows if (r["model"], r["condition"]) == (model, condition)]
            layers = [row for row in own if row["layer"] != "all"]
            less = [row["layer"] for row in layers if row["high"] < 1]
            more = [row["layer"] for row in layers if row["low"] > 1]
            whole = next(row for row in own if row["layer"] == "all")
            lines.append(
                f"{model}, {condition}: {whole['seen']:.1%} seen, {whole['ratio']:.3f} of continued"
                f" ({whole['low']:.3f} to {whole['high']:.3f}; n = {whole['n']}); less in "
                f"{len(less)} of {len(layers)} layers {less}, more in {len(more)} {more}"
            )
    return lines


def draw(rows: list[dict[str, Any]], name: str, docs: Path) -> None:
    """One panel per model: pairs seen across a change / across none, by layer."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plot.panels(names, width=5.0)
    for axis, model in zip(axes, names, strict=True):
        plot.level(axis, 1)
        for number, condition in enumerate(CONDITIONS[1:], 1):
            own = [r for r in rows if (r["model"], r["condition"]) == (model, condition)
                   and r["layer"] != "all"]  # fmt: skip
            x = [row["layer"] + 0.15 * (number - 1) for row in own]
            plot.line(axis, number, x, [row["ratio"] for row in own], condition, linestyle="")
            axis.vlines(x, [row["low"] for row in own], [row["high"] for row in own],
                        color=plot.COLOURS[number], linewidth=1)  # fmt: skip
        axis.set(xlabel="layer", ylabel="seen across / if continued", ylim=(0, None))
    plot.legend(axes[0])
    save_figure(figure, name, docs)


if __name__ == "__main__":
    main()
