"""A small pretrained model with some text, part of the package: no download is needed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "tiny"  # what the commands call it
FOLDER = Path(__file__).parent


def load_model() -> PreTrainedModel:
    """In float32: GPT-2's architecture, 6 layers, 512 positions; see README.md in this folder."""
    import torch
    from transformers import GPT2LMHeadModel

    # stored in bfloat16 to save space; most CPUs are slow in it
    model: PreTrainedModel = GPT2LMHeadModel.from_pretrained(FOLDER, dtype=torch.float32)
    # an adapter records what it was trained on, and other machines have other folders
    model.config.name_or_path = NAME
    model.eval()
    return model


def text_file(name: Literal["train", "held_out"]) -> Path:
    """Books to fine-tune on, or one that the model was not trained on, as gzipped text."""
    return FOLDER / f"{name}.txt.gz"
