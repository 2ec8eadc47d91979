"""What the stored rows say about the paper's claims: the statements of docs/results.md again.

    python -m experiments.audit               reads docs/results, writes docs/results/audit.json

Nothing is trained or measured. "Frozen" is compared at equal sparsity, each with its own dense
model: the fine-tuned one for all weights, the original for a frozen base.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

from experiments.publish import DOCS, publish

Row = dict[str, Any]


def main() -> None:
    rows = [*frozen(), *temperature(), *opening(), *twins(), *switch(), *uneven()]
    publish("audit", {"command": "python -m experiments.audit"}, rows)
    for row in rows:
        print("  ".join(f"{name} {shown(value)}" for name, value in row.items()))


def stored(name: str) -> list[Row]:
    rows: list[Row] = document(name)["rows"]
    return rows


def document(name: str) -> Any:
    return json.loads((DOCS / "results" / f"{name}.json").read_text())


def frozen() -> list[Row]:
    """The cost of a frozen base, and of all weights at equal sparsity, on the line between runs."""
    curve, rows = stored("tiny_curve"), []
    for context in ("all", 512):
        at = [row for row in curve if row["context"] == context]
        before = next(row["perplexity"] for row in at if row["method"] == "before")
        for base in stored("frozen"):
            if (base["variant"], base["context"]) != ("frozen base", context):
                continue
            own = [row for row in at if row["seed"] == base["seed"]]
            dense = next(row["perplexity"] for row in own if row["method"] == "dense")
            points = [
                (row["sparsity"], math.log(row["perplexity"] / dense))
                for row in own
                if row["method"] == "pruning"
            ]
            line = sorted([(0.0, 0.0), *points])
            rows.append({
                "about": "frozen base", "context": context, "gamma": base["gamma"],
                "seed": base["seed"], "sparsity": base["sparsity"],
                "frozen / its dense": base["perplexity"] / before,
                "all weights / theirs": math.exp(between(line, base["sparsity"])),
            })  # fmt: skip
    return rows


def between(line: list[tuple[float, float]], x: float) -> float:
    for (a, low), (b, high) in pairwise(line):
        if a <= x <= b:
            return low + (high - low) * (x - a) / (b - a)
    return math.nan


def temperature() -> list[Row]:
    """Soft and hard perplexity of both gates; the score at which each reaches 0 is not the same."""
    return [
        {"about": "temperature", "gate": row["variant"], "gamma": row["gamma"], "seed": row["seed"],
         "soft": row["ppl_soft"], "hard": row["ppl_hard"], "hard / soft":
         row["ppl_hard"] / row["ppl_soft"]}
        for row in stored("temperature")
        if row["context"] == "all"
    ]  # fmt: skip


def opening() -> list[Row]:
    """The soft sparsity at steps 1, 10, 30 and at the end: whether the gates open at first."""
    rows = []
    for run in stored("training_curves"):
        if run["gamma"] is None:
            continue
        by_step = dict(zip(run["step"], run["sparsity_soft"], strict=True))
        rows.append({"about": "opening", "gamma": run["gamma"], "seed": run["seed"],
                     "step 1": by_step[1], "step 10": by_step[10], "step 30": by_step[30],
                     "least": min(by_step.values()), "end": run["sparsity_soft"][-1]})  # fmt: skip
    return rows


def twins() -> list[Row]:
    """Layers in which dropped tokens have the nearer twin on average, by both definitions."""
    rows = []
    for name in ("forgetting", "smollm2_forgetting"):
        for among, near in document(name)["nearest"].items():
            pairs = [
                (gone, stay)
                for gone, stay in zip(near["mean_dropped"], near["mean_kept"], strict=True)
                if gone is not None and stay is not None
            ]
            rows.append({"about": "near twins", "rows of": name, "among": among,
                         "layers": len(pairs), "nearer": sum(g < s for g, s in pairs),
                         "dropped": sum(g for g, _ in pairs) / len(pairs),
                         "kept": sum(s for _, s in pairs) / len(pairs)})  # fmt: skip
    return rows


def switch() -> list[Row]:
    """Layers that see less across the one switch of one passage than at its distances elsewhere."""
    rows = []
    for name in ("forgetting", "smollm2_forgetting"):
        seen = document(name)["switch"]
        pairs = list(zip(seen["across"], seen["expected"], strict=True))
        rows.append({"about": "context switch, one passage", "rows of": name, "layers": len(pairs),
                     "less across": sum(a < e for a, e in pairs)})  # fmt: skip
    return rows


def uneven() -> list[Row]:
    """The time of uneven rows against even ones."""
    rows: list[Row] = []
    for size in ("full", "bench"):
        file = DOCS.parent / "benchmarks" / "results" / size / "decode.json"
        share = json.loads(file.read_text())["ratios"]["uneven_vs_ideal"]
        rows.append({"about": "uneven / even rows", "rows of": f"decode.json, {size}",
                     "time": share})  # fmt: skip
    timed = [row for row in stored("throughput") if row["model"] == "tiny"
             and row["side"] == "pruned" and row["context"] == 480]  # fmt: skip
    own = [row for row in timed if row["rows"] == "realistic"]
    ideal = [row for row in timed if row["rows"] == "ideal"]
    for real, even in zip(own, ideal, strict=True):
        rows.append({"about": "uneven / even rows", "rows of": f"throughput, tiny, {even['at']}",
                     "time": even["ratio"] / real["ratio"]})  # fmt: skip
    return rows


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
