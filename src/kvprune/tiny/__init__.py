"""A small pretrained model of our own with a little text: real, and here without a download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "tiny"  # what the commands call it
FOLDER = Path(__file__).parent


def load_model() -> PreTrainedModel:
    """In float32: GPT-2's architecture, 6 layers, 512 positions. README.md beside it says more."""
    import torch
    from transformers import GPT2LMHeadModel

    # stored in bfloat16 to be small; most CPUs are slow in it
    model: PreTrainedModel = GPT2LMHeadModel.from_pretrained(FOLDER, dtype=torch.float32)
    # an adapter remembers what it was trained on, and other machines have other folders
    model.config.name_or_path = NAME
    return model.eval()


def text_file(name: Literal["train", "held_out"]) -> Path:
    """Books to fine-tune on, or one that the model has never seen, as gzipped text."""
    return FOLDER / f"{name}.txt.gz"
