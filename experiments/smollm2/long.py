"""Long training of the pruned SmolLM2: stages of several hours, each resumed wherever it stopped.

    python -m experiments.smollm2.long STAGE... --texts DIR --runs RUNS [--chats FILE]

DIR is what mixture.py wrote. A stage starts from a shipped adapter or from an earlier stage, ends
as RUNS/STAGE, and is then validated (validate.py) into RUNS/validation.jsonl. Every stage reads the
same rows, so the dense model reads each of them once, for all strengths. bfloat16 is used where
this CPU multiplies in it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState

from experiments.smollm2.train import BASE, RECIPE, finished
from kvprune.adapters import registry
from kvprune.errors import PruneError
from kvprune.train.average import ADAPTER
from kvprune.train.recipe import make_recipe, merge_settings, read_yaml
from kvprune.train.run import run
from kvprune.utils.malloc import keep_memory

LENGTH = 2048
VALIDATE_EVERY = 100  # steps
# α goes back far enough for gates to move again; the mean over steps replaces mixtures by hand
TRAIN: dict[str, Any] = {
    "alpha_start": 3.0, "alpha_share": 0.8, "interaction_lr": 1e-3, "base_lr": 6e-4,
    "lr_schedule": "cosine", "warmup": 20, "steps": 600, "accumulation": 2, "average": 60,
    "log_every": 10, "probe_every": 100, "probe_rows": 2, "eval_every": 200, "save_every": 10,
    "keep_checkpoints": 2,
}  # fmt: skip


def stage(start: str, gamma: float, **train: Any) -> dict[str, Any]:
    return {"start": start, "train": {**TRAIN, "gamma": gamma, **train}}


# first of all the strength that most people use; a second round with longer rows and all chats
STAGES: dict[str, dict[str, Any]] = {
    "80a": stage("smollm2-135m-80", 0.22),
    "70a": stage("smollm2-135m-70", 0.1),
    "90a": stage("80a", 0.7),
    "80b": stage("80a", 0.22, alpha_start=4.0, steps=1800),
    "70b": stage("70a", 0.1, alpha_start=4.0, steps=1800),
    "90b": stage("90a", 0.7, alpha_start=4.0, steps=1800),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="+", metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--chats", type=Path, help="of held-out documents, to validate on")
    args = parser.parse_args()
    keep_memory()
    for name in args.stages:
        train(name, args.texts, args.runs, args.chats)
        validate(args.runs / name, args.texts, args.runs, args.chats, name)


def train(name: str, texts: Path, runs: Path, chats: Path | None = None) -> None:
    folder = runs / name
    if finished(folder):
        return
    resume = any(folder.glob("checkpoint-*"))
    print(f"{'resuming' if resume else 'training'} {folder}", flush=True)
    watch = ValidatedCheckpoints(folder, texts, chats)
    recipe = make_recipe(settings(name, texts, runs))
    run(recipe, folder, resume, callbacks=[watch], disable_tqdm=True)


class ValidatedCheckpoints(TrainerCallback):
    """Validates the mean of the weights now and then, while the run waits."""

    def __init__(self, folder: Path, texts: Path, chats: Path | None):
        self.folder, self.texts, self.chats = folder, texts, chats

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step % VALIDATE_EVERY == 0:
            mean = self.folder / f"checkpoint-{state.global_step}" / ADAPTER
            name = f"{self.folder.name} at {state.global_step}"
            validate(mean, self.texts, self.folder.parent, self.chats, name)


def settings(name: str, texts: Path, runs: Path) -> dict[str, Any]:
    """The recipe of a stage."""
    if name not in STAGES:
        raise PruneError(f"stage {name!r} is unknown; there are {', '.join(STAGES)}")
    start = STAGES[name]["start"]
    folder = runs / start if start in STAGES else registry.FOLDER / start
    if not finished(folder):
        raise PruneError(f"{name} starts from {folder}, which is not trained yet")
    over = {
        "model": BASE,
        "start": str(folder),
        "data": {
            "sources": [str(texts / "train.jsonl")], "length": LENGTH, "whole": True,
            "cache_dir": str(runs / "tokens"),
        },
        "train": {
            **STAGES[name]["train"],
            "bf16": multiplies_bfloat16(),
            "teacher_cache": str(runs / "teacher"),
        },
    }  # fmt: skip
    return merge_settings(read_yaml(RECIPE), over)


def multiplies_bfloat16() -> bool:
    """Elsewhere bfloat16 is emulated, and slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def validate(adapter: Path, texts: Path, runs: Path, chats: Path | None, name: str) -> None:
    """In a process of its own, whose memory is free again afterwards."""
    command = [sys.executable, "-m", "experiments.smollm2.validate", BASE, str(adapter)]
    command += ["--texts", str(texts), "--log", str(runs / "validation.jsonl"), "--name", name]
    command += ["--chats", str(chats)] if chats else []
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
