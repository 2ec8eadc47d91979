"""The paper's recipe as printed, on the package's small model; then each of our changes alone.

    python -m experiments.paper_recipe --corpus DIR [--steps 2000] [--seeds 2]

DIR holds `books-*.jsonl.gz`, the text that the model was pretrained on; it is fine-tuned on the
same books and measured on one that it has never read. α from 1 to 8 by cosine, then constant; β of
2, r = 64, Adam, one constant rate for all weights, no clipping, next-token loss + γ · mean keep.
Every run has checkpoints: a second call goes on where the first one stopped, also inside a run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kvprune
from experiments import small
from experiments.pretrain_tiny import documents
from experiments.publish import DOCS, publish
from kvprune.evaluate.points import Points
from kvprune.train.recipe import make_recipe
from kvprune.train.run import run
from kvprune.utils.files import write_atomically
from kvprune.utils.malloc import keep_memory

PAPER: dict[str, Any] = {
    "alpha_start": 1.0, "alpha_end": 8.0, "alpha_schedule": "cosine", "alpha_share": 0.8,
    "interaction_lr": 1e-4, "base_lr": 1e-4, "lr_schedule": "constant", "warmup": 0, "batch": 6,
    "max_grad_norm": 0.0, "spread": False, "distill": 0.0, "tune": "all",
}  # fmt: skip
PRUNING = {"method": "pruning", "rank": 64, "beta": 2.0}
GAMMA = 0.3  # where our changes are compared
# name: method, and differences from the paper's settings
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": ({"method": "dense"}, {}),
    **{f"gamma-{g:g}": (PRUNING, {"gamma": g}) for g in (0.03, 0.1, 0.3, 1.0)},
    **{f"local-{n}": ({"method": "local", "window": n}, {}) for n in (256, 128, 64)},
    **{f"strided-{n}": ({"method": "strided", "stride": n}, {}) for n in (256, 128, 64)},
    "spread": (PRUNING, {"gamma": GAMMA, "spread": True}),
    "alpha-1.5": (PRUNING, {"gamma": GAMMA, "alpha_start": 1.5}),
    "distilled": (PRUNING, {"gamma": GAMMA, "distill": 1.0}),
    "protect-16": ({**PRUNING, "protect_recent": 16}, {"gamma": GAMMA}),
    "interaction-lr": (PRUNING, {"gamma": GAMMA, "interaction_lr": 1e-3}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=2, help="runs with seeds 0, 1, ...")
    parser.add_argument("--only", nargs="*", default=list(RUNS), help=", ".join(RUNS))
    parser.add_argument("--runs", type=Path, default=Path("runs/paper"))
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    keep_memory()
    text = books(args.corpus, args.runs)
    rows = []
    # every setting with one seed before the next seed
    for seed in range(args.seeds):
        for name in args.only:
            rows += list(measured(name, seed, args.steps, text, args.runs))
    publish("paper_recipe", {"model": "tiny", "steps": args.steps, **PAPER}, rows, args.docs)


def books(corpus: Path, runs: Path) -> Path:
    """The text of the pretraining, as one file."""
    file = runs / "books.jsonl"
    if not file.exists():
        runs.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": text}) for text in documents(corpus, held_out=False)]
        write_atomically(file, ("\n".join(lines) + "\n").encode())
    return file


def measured(name: str, seed: int, steps: int, text: Path, runs: Path) -> Iterator[dict[str, Any]]:
    """One row per context of a run, which is trained at its first use."""
    folder = runs / f"{name}-{steps}-{seed}"
    key = {"name": name, "seed": seed, "steps": steps}
    points = Points(folder / "rows.json", {**PAPER, "method": RUNS[name][0], **RUNS[name][1]})

    def rows() -> list[dict[str, Any]]:
        if not (folder / "README.md").exists():  # written last
            resume = any(folder.glob("checkpoint-*"))
            print(f"{'resuming' if resume else 'training'} {folder}", flush=True)
            given = settings(name, seed, steps, text, runs)
            run(make_recipe(given), folder, resume, disable_tqdm=True)
        with kvprune.load(folder) as pruned:
            return [
                {**key, "context": context, "sparsity": sparsity, "perplexity": perplexity}
                for context, sparsity, perplexity in small.by_context(pruned)
            ]

    yield from points.measure(key, rows)


def settings(name: str, seed: int, steps: int, text: Path, runs: Path) -> dict[str, Any]:
    method, changes = RUNS[name]
    every = max(1, steps // 10)
    return {
        "model": "tiny",
        "data": {
            "sources": [str(text)], "length": small.LENGTH, "held_out": 16, "seed": seed,
            "cache_dir": str(runs / "tokens"),
        },
        "method": method,
        "train": {
            **PAPER, **changes, "steps": steps, "seed": seed, "log_every": 20, "probe_every": every,
            "probe_rows": 2, "eval_every": every, "save_every": 50, "keep_checkpoints": 1,
        },
    }  # fmt: skip


if __name__ == "__main__":
    main()
