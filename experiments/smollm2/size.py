"""How large is an adapter? By the ranks of LoRA and of the interaction, saved in bfloat16.

    python -m experiments.smollm2.size MODEL

Nothing is trained: adapters with random weights are saved and their files measured.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import kvprune
from experiments.smollm2.common import table
from experiments.smollm2.shrink import shrink
from kvprune.adapters import lora
from kvprune.evaluate.cost.shape import load_config

LORA, INTERACTION = (8, 16), (16, 32, 64)
LIMIT = 12e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    args = parser.parse_args()
    rows = []
    for rank in LORA:
        for width in INTERACTION:
            numbers, saved = sizes(args.model, rank, width)
            rows.append([str(rank), str(width), f"{numbers:,}", f"{2 * numbers / 1e6:.2f}",
                         f"{saved / 1e6:.2f}", "yes" if saved <= LIMIT else "no"])  # fmt: skip
            print(f"LoRA {rank}, interaction {width}: {saved:,} bytes", flush=True)
    table(["LoRA rank", "interaction rank", "numbers", "MB, computed", "MB, saved",
           f"within {LIMIT / 1e6:g} MB"], rows)  # fmt: skip


def sizes(model: str, rank: int, width: int) -> tuple[int, int]:
    """Trained numbers, and bytes of the files with them in bfloat16."""
    # a small vocabulary: adapters do not contain the embedding
    config = load_config(model)
    config.get_text_config().vocab_size = 8
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lora.add(base, rank, 2.0 * rank)
    pruned = kvprune.attach(base, kvprune.PruningConfig(rank=width))
    numbers = sum(
        p.numel() for n, p in base.named_parameters() if ".lora_" in n or ".interaction." in n
    )
    with tempfile.TemporaryDirectory() as folder:
        pruned.save(Path(folder) / "full")
        return numbers, shrink(Path(folder) / "full", Path(folder) / "half")[1]


if __name__ == "__main__":
    main()
