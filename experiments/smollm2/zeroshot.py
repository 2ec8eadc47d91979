"""Zero-shot tasks of SmolLM2: dense, then each strength, in one table.

    python -m experiments.smollm2.zeroshot MODEL ADAPTER... --files DIR

Runs `kvprune eval zeroshot` for each: all of WinoGrande, PIQA and LAMBADA, the first
1,000 of HellaSwag. It resumes where it stopped, task by task; rows in
docs/results/smollm2_zeroshot.json.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from experiments.publish import publish
from experiments.smollm2 import common
from experiments.smollm2.common import DENSE, OURS, Row, table
from kvprune.adapters import bases
from kvprune.evaluate.zeroshot.run import HUB, Measured, run
from kvprune.utils.malloc import keep_memory
from kvprune.utils.quiet import quiet

HELLASWAG = 1000


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument(
        "--files", type=Path, help="folder with one file per task; from the hub by default"
    )
    parser.add_argument("--tasks", default=",".join(HUB))
    parser.add_argument("--hellaswag", type=int, default=HELLASWAG, help="samples of HellaSwag")
    args = parser.parse_args()
    quiet()
    keep_memory()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about what is intended here
    runs = [(DENSE, None), *((OURS, folder) for folder in args.adapters)]
    rows = [
        {"method": method, "strength": folder and folder.name, **row.to_dict()}
        for method, folder in runs
        for row in measured(args, folder).rows
    ]
    about = {"model": args.model, "hellaswag": args.hellaswag}
    publish("smollm2_zeroshot", about, rows, args.docs)
    show(rows)


def measured(args: argparse.Namespace, folder: Path | None) -> Measured:
    tasks = args.tasks.split(",")
    limit = {task: args.hellaswag for task in tasks if task == "hellaswag"}
    model, adapter = (args.model, str(folder)) if folder else (dense(args.model), None)
    out = args.runs / "zeroshot" / (folder.name if folder else DENSE)
    print(f"{out.name}: {', '.join(tasks)}", flush=True)
    return run(model, adapter=adapter, tasks=tasks, files=args.files, limit=limit, out=out)


def dense(model: str) -> str:
    """The bare name of one of our bases means its default adapter."""
    return f"{model}{bases.DENSE}" if model in bases.BASES else model


def show(rows: list[Row]) -> None:
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    runs = list(dict.fromkeys((row["method"], row["strength"]) for row in rows))
    by_run = {(row["method"], row["strength"], row["task"]): row for row in rows}
    table(
        ["", *tasks],
        [[strength or method, *(cell(by_run[method, strength, task]) for task in tasks)]
         for method, strength in runs],
    )  # fmt: skip


def cell(row: Row) -> str:
    """Accuracy, the task's second metric in brackets, the share pruned."""
    normed, perplexity = row.get("accuracy_norm"), row.get("perplexity")
    second = f" ({normed:.1%})" if normed else f" ({perplexity:.1f})" if perplexity else ""
    return f"{row['accuracy']:.1%}{second}, {row['sparsity']:.0%}"


if __name__ == "__main__":
    main()
