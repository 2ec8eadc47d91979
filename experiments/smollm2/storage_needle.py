"""Does SmolLM2 find a fact as often if its cache holds keys and values in int8?

    python -m experiments.smollm2.storage_needle MODEL ADAPTER... --text held_out_book.txt

The prompts of `experiments.smollm2.needle`, each asked twice: keys and values as they are, and in
int8. They are read in chunks, so that the question sees the fact as it is stored.
It resumes where it stopped; rows in docs/results/smollm2_storage_needle.json.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from experiments.publish import publish
from experiments.smollm2 import common
from experiments.smollm2.common import OURS, Adapter, Row, Subject, table
from experiments.smollm2.needle import Prompt, all_prompts, ask_all, digest, mean
from kvprune.evaluate.text_file import read_text
from kvprune.utils.parse import numbers

KV = (None, "int8")
CHUNK = 128


def main() -> None:
    parser = common.arguments(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="the filler: .txt or .txt.gz")
    parser.add_argument("--contexts", default="1000,2000")
    parser.add_argument("--depths", default="0.1,0.3,0.5,0.7,0.9")
    parser.add_argument("--seeds", type=int, default=2, help="prompts at each depth")
    args = parser.parse_args()
    rows = run(args)
    publish("smollm2_storage_needle", {"model": str(args.model), "chunk": CHUNK}, rows, args.docs)
    show(rows)


def run(args: argparse.Namespace) -> list[Row]:
    """One row per strength and context: both forms, and on how many prompts they disagree."""
    subject = common.subject(args)
    depths = numbers(args.depths, float, "--depths")
    filler = subject.tokenizer(read_text(args.text)[:2_000_000], verbose=False).input_ids
    rows = []
    for context in sorted(numbers(args.contexts, int, "--contexts")):
        prompts = list(all_prompts(subject.tokenizer, filler, context, depths, args.seeds))
        for adapter in subject.adapters:
            points = common.points(args, f"storage_needle-{adapter.name}")
            where = {"context": context, "prompts": digest(prompts), "chunk": CHUNK}
            where |= {"strength": adapter.name, "adapter": adapter.digest}
            plain, narrow = (
                points.measure({**where, "kv": kv}, partial(asked, subject, adapter, prompts, kv))
                for kv in KV
            )
            rows.append({"strength": adapter.name, "context": context, **both(plain, narrow)})
            print(rows[-1], flush=True)
    return rows


def asked(subject: Subject, adapter: Adapter, prompts: list[Prompt], kv: str | None) -> list[Row]:
    with subject.attached(OURS, adapter) as pruned:
        return ask_all(pruned, subject.tokenizer, prompts, CHUNK, kv=kv)


def both(plain: list[Row], narrow: list[Row]) -> Row:
    row: Row = {"prompts": len(plain), "sparsity": 1 - mean(plain, "kept") / mean(plain, "seen")}
    for name in ("found", "better", "log_p"):
        row |= {name: mean(plain, name), f"{name}_int8": mean(narrow, name)}
    pairs = list(zip(plain, narrow, strict=True))
    row["found_by_one"] = sum(a["found"] != b["found"] for a, b in pairs)
    row["log_p_apart"] = sum(abs(a["log_p"] - b["log_p"]) for a, b in pairs) / len(pairs)
    return row


def show(rows: list[Row]) -> None:
    table(
        ["strength", "context", "prompts", "pruned", "found", "in int8", "found by one only",
         "better than wrong ones", "in int8", "log p", "in int8"],
        [
            [row["strength"], str(row["context"]), str(row["prompts"]), f"{row['sparsity']:.0%}",
             f"{row['found']:.0%}", f"{row['found_int8']:.0%}", str(row["found_by_one"]),
             f"{row['better']:.0%}", f"{row['better_int8']:.0%}", f"{row['log_p']:.3f}",
             f"{row['log_p_int8']:.3f}"]
            for row in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
