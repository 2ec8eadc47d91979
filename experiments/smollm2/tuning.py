"""What would full fine-tuning give in addition to LoRA? Short runs on the same rows.

    python -m experiments.smollm2.tuning [--only lora-0.001]

Runs differ in what learns and how fast, and in nothing else: the same rows in the same order, γ and
α as in the recipe, from the dense model. KL and the share pruned are means over the last steps,
which are the same rows for all; perplexity is that of held-out rows with the hard gate. A finished
run is not repeated; rows in docs/results/smollm2_tuning.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.publish import DOCS, publish
from experiments.smollm2.common import Row, table
from experiments.smollm2.train import BASE, RECIPE, curve
from kvprune.errors import PruneError
from kvprune.train.recipe import make_recipe, merge_settings, read_yaml
from kvprune.train.run import run
from kvprune.utils.files import write_atomically
from kvprune.utils.malloc import keep_memory

# what learns in addition to the interaction weights, and its learning rate (they have their own)
VARIANTS: dict[str, tuple[str, float]] = {
    f"{tune}-{rate:g}": (tune, rate)
    for tune, rate in (
        ("interaction", 0.0), ("lora", 3e-4), ("lora", 1e-3), ("all", 3e-5), ("all", 1e-4),
    )
}  # fmt: skip
LAST = 20  # steps of which the mean is taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2/tuning"))
    parser.add_argument("--docs", type=Path, default=DOCS)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row, one row per step")
    parser.add_argument("--only", choices=list(VARIANTS), help="one of the runs")
    args = parser.parse_args()
    keep_memory()
    wanted = [args.only] if args.only else list(VARIANTS)
    for name in wanted:
        train(name, args)
    rows = [row for name in VARIANTS if (row := summary(name, args)) is not None]
    about = {"recipe": RECIPE.name, "steps": args.steps, "length": args.length, "last": LAST}
    publish("smollm2_tuning", about, rows, args.docs)
    show(rows)


def run_folder(name: str, args: argparse.Namespace) -> Path:
    folder: Path = args.runs / f"{name}-{args.steps}x{args.length}"
    return folder


def train(name: str, args: argparse.Namespace) -> None:
    folder = run_folder(name, args)
    if (folder / "metrics.json").is_file():
        return
    tune, rate = VARIANTS[name]
    over: dict[str, Any] = {
        "model": BASE,
        "data": {"length": args.length},
        "train": {"tune": tune, "base_lr": rate, "steps": args.steps, "save_every": args.steps,
                  "eval_every": args.steps, "probe_every": args.steps},
    }  # fmt: skip
    if args.steps < LAST:
        raise PruneError(f"--steps is {args.steps}; the mean of the last {LAST} needs that many")
    resume = any(folder.glob("checkpoint-*"))
    result = run(make_recipe(merge_settings(read_yaml(RECIPE), over)), folder, resume)
    write_atomically(folder / "metrics.json", json.dumps(result.metrics).encode())


def summary(name: str, args: argparse.Namespace) -> Row | None:
    file = run_folder(name, args) / "metrics.json"
    if not file.is_file():
        return None
    metrics = json.loads(file.read_text())
    last = [row for row in curve(name, file.parent) if row["step"] > args.steps - LAST]
    tune, rate = VARIANTS[name]
    return {
        "tune": tune, "rate": rate,
        "kl": mean(row["loss_kl"] for row in last),
        "sparsity_train": mean(row["sparsity_soft"] for row in last),
        "sparsity": metrics["eval_sparsity_hard"], "perplexity": metrics["eval_ppl_hard"],
    }  # fmt: skip


def show(rows: list[Row]) -> None:
    table(
        ["what learns", "its rate", "KL", "pruned", "held out: perplexity", "pruned"],
        [
            [row["tune"], f"{row['rate']:g}", f"{row['kl']:.4f}", f"{row['sparsity_train']:.1%}",
             f"{row['perplexity']:.2f}", f"{row['sparsity']:.1%}"]
            for row in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
