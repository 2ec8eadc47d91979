"""A small pretrained model of our own with a little text: real, and here without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

NAME = "tiny"  # what the commands call it
FOLDER = Path(__file__).parent


def load() -> tuple[Any, Any]:
    """The model, in float32, and its tokenizer: GPT-2's architecture, 6 layers, 512 positions."""
    import torch
    from transformers import AutoTokenizer, GPT2LMHeadModel

    # stored in bfloat16 to be small; most CPUs are slow in it
    model = GPT2LMHeadModel.from_pretrained(FOLDER, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(FOLDER)


def text_file(name: Literal["train", "held_out"]) -> Path:
    """Books to fine-tune on, or one that the model has never seen, as gzipped text."""
    return FOLDER / f"{name}.txt.gz"
