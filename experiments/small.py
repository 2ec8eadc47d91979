"""Shared by the experiments on the package's small model: text, recipe, finished runs.

A run is identified by its settings: two experiments that need the same one train it once. Each has
its own folder in runs/small/ with the model and its measurements (run.json), so experiments can run
in parallel.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

import kvprune
from kvprune import Pruned, tiny
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.config import Config, to_dict
from kvprune.evaluate.perplexity.measure import perplexity
from kvprune.evaluate.points import Points
from kvprune.text.config import DataConfig
from kvprune.text.rows import Data, load_rows
from kvprune.train import PruningTrainer, TrainConfig
from kvprune.utils.quiet import quiet

LENGTH, RANK = 512, 32
CONTEXTS = (64, 128, 256, 512)
# as in `make demo`, but longer and with the paper's loss; see docs/results.md
RECIPE: dict[str, Any] = {
    "steps": 100, "batch": 4, "warmup": 5, "interaction_lr": 1.5e-3, "base_lr": 3e-4,
    "lr_schedule": "linear", "log_every": 5, "probe_every": 1000,
}  # fmt: skip
CURVE = ("step", "loss_language", "sparsity_soft", "alpha")
Record = dict[str, Any]


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=2, help="runs with seeds 0, 1, ...")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of finished runs")
    return parser


class Runs:
    """Runs, each trained at its first use."""

    def __init__(self, folder: Path):
        self.folder = folder / "small"
        weights = (tiny.FOLDER / "model.safetensors").read_bytes()
        digest = hashlib.sha256(weights).hexdigest()[:12]
        self.about = {"model": tiny.NAME, "weights": digest, **RECIPE}

    def record(self, method: Config, seed: int = 0, **settings: Any) -> Record:
        """The measurements of a run; `settings` override the recipe."""
        key = {"method": to_dict(method), "seed": seed, **settings}
        points = Points(self._folder(method, seed, settings) / "run.json", self.about)
        rows = points.measure(key, lambda: [self._run(method, seed, settings)])
        summary = " ".join(f"{at}: {s:.1%} {ppl:.2f}," for at, s, ppl in rows[0]["contexts"])
        print(method.method, {k: v for k, v in key.items() if k != "method"}, summary, flush=True)
        return rows[0]

    def model(self, method: Config, seed: int = 0, **settings: Any) -> Pruned:
        """The model of a run."""
        return kvprune.load(self.run_folder(method, seed, **settings))

    def run_folder(self, method: Config, seed: int = 0, **settings: Any) -> Path:
        """The folder of a finished run: a model for `kvprune` commands."""
        self.record(method, seed, **settings)
        return self._folder(method, seed, settings)

    def _folder(self, method: Config, seed: int, settings: dict[str, Any]) -> Path:
        text = json.dumps([to_dict(method), seed, settings], sort_keys=True)
        return self.folder / f"{method.method}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def _run(self, method: Config, seed: int, settings: dict[str, Any]) -> Record:
        trainer = fine_tuned(method, seed, **settings)
        trainer.save_model(str(self._folder(method, seed, settings)))
        metrics = trainer.evaluate()
        history = [entry for entry in trainer.state.log_history if "loss_language" in entry]
        names = [name for name in CURVE if name in history[0]]
        return {
            "contexts": by_context(trainer.pruned),
            "curve": {name: [entry[name] for entry in history] for name in names},
            "end": {k: v for k, v in metrics.items() if k.startswith(("eval_ppl", "eval_spars"))},
            "tokens_per_second": history[-1]["tokens_per_second"],
        }


def fine_tuned(method: Config, seed: int = 0, **settings: Any) -> PruningTrainer:
    """The small model fine-tuned with this method; `settings` override the recipe."""
    quiet()
    text = data(seed)
    config = TrainConfig(**{**RECIPE, "method": method, "seed": seed, **settings})
    with tempfile.TemporaryDirectory() as scratch:
        options = {"report_to": [], "eval_strategy": "no", "save_strategy": "no"}
        trainer = PruningTrainer(
            tiny.load_model(),
            config,
            config.arguments(scratch, **options),
            train_dataset=text.train,
            eval_dataset=text.held_out,
            processing_class=load_tokenizer(tiny.NAME),
        )
        trainer.train()
    trainer.pruned.model.eval()
    return trainer


@cache
def data(seed: int = 0) -> Data:
    """Two books to train on, a third to measure on."""
    files = [str(tiny.text_file(name)) for name in ("train", "held_out")]
    config = DataConfig((files[0],), LENGTH, held_out_source=files[1], seed=seed)
    return load_rows(config, load_tokenizer(tiny.NAME))


def held_out() -> torch.Tensor:
    """Tokens of the book that the model was not trained on."""
    rows = data().held_out
    assert rows is not None
    return torch.cat([rows[i]["input_ids"] for i in range(len(rows))])


def by_context(pruned: Pruned, windows: int = 64) -> list[tuple[int | str, float, float]]:
    """Context, sparsity and perplexity with the hard gate; the last row is over all contexts."""
    rows = perplexity(
        pruned, held_out(), CONTEXTS, length=LENGTH, max_windows=windows, progress=False
    )
    return [(row.context, round(row.sparsity, 4), round(row.perplexity, 3)) for row in rows]
