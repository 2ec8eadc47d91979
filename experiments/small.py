"""What the experiments on the package's small model share: its text, its recipe, the measuring."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from kvprune import Pruned, tiny
from kvprune.config import Config
from kvprune.evaluate.perplexity import perplexity
from kvprune.files import write_whole
from kvprune.pretrained import load_tokenizer
from kvprune.train import PruningTrainer, TrainConfig
from kvprune.train.config import DataConfig
from kvprune.train.data import Data, load
from kvprune.version import __version__

DOCS = Path(__file__).parent.parent / "docs"
LENGTH, BATCH = 512, 4
CONTEXTS = (64, 128, 256, 512)
# as in `make demo`; found by trying, see docs/results.md
RECIPE: dict[str, Any] = {
    "steps": 100, "batch": BATCH, "warmup": 5, "interaction_lr": 3e-3, "base_lr": 3e-4,
    "lr_schedule": "linear", "log_every": 10, "probe_every": 1000,
}  # fmt: skip
RANK = 32


def arguments(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=RECIPE["steps"])
    parser.add_argument("--seeds", type=int, default=2, help="runs with seeds 0, 1, ...")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="where finished points lie")
    return parser


def data(seed: int = 0) -> Data:
    """Two books to learn from, a third to measure on."""
    files = [str(tiny.text_file(name)) for name in ("train", "held_out")]
    config = DataConfig((files[0],), LENGTH, held_out_source=files[1], seed=seed)
    return load(config, load_tokenizer(tiny.NAME))


def fine_tuned(method: Config, seed: int = 0, **settings: Any) -> PruningTrainer:
    """The small model, taught with this method; `settings` go before the recipe."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    text = data(seed)
    config = TrainConfig(**{**RECIPE, "method": method, "seed": seed, **settings})
    with tempfile.TemporaryDirectory() as scratch:
        quiet = {"report_to": [], "eval_strategy": "no", "save_strategy": "no"}
        trainer = PruningTrainer(
            tiny.load_model(),
            config,
            config.arguments(scratch, **quiet),
            train_dataset=text.train,
            eval_dataset=text.held_out,
        )
        trainer.train()
    trainer.pruned.model.eval()
    return trainer


def held_out() -> torch.Tensor:
    """The tokens of the book that the model never saw."""
    rows = data().held_out
    assert rows is not None
    return torch.cat([rows[i]["input_ids"] for i in range(len(rows))])


def measured(pruned: Pruned, windows: int = 64) -> list[dict[str, Any]]:
    """Rows of context, sparsity and perplexity, the hard gate; "all" is over all contexts."""
    rows = perplexity(
        pruned, held_out(), CONTEXTS, length=LENGTH, max_windows=windows, progress=False
    )
    return [
        {
            "context": row.context,
            "sparsity": round(row.sparsity, 4),
            "perplexity": round(row.perplexity, 3),
        }
        for row in rows
    ]


def about(**more: Any) -> dict[str, Any]:
    """What rows must have in common to be compared."""
    return {
        "model": tiny.NAME, "kvprune": __version__, "torch": torch.__version__,
        "transformers": transformers.__version__, **RECIPE, "length": LENGTH, "rank": RANK, **more,
    }  # fmt: skip


def publish(name: str, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """The rows, as docs/results/NAME.json."""
    file = DOCS / "results" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = json.dumps(about, ensure_ascii=False)
    write_whole(file, f'{{\n "about": {head},\n "rows": [\n  {lines}\n ]\n}}\n'.encode())
    print(f"wrote {file}")
