"""How much is measured: models that people run on a GPU, or hardly anything on a CPU."""

from typing import NamedTuple

import torch

from kvprune.evaluate.roofline.models import LLAMA_1B, Decoder


class Sizes(NamedTuple):
    """`counts`: whether the times mean anything."""

    counts: bool
    model: Decoder
    dtype: torch.dtype
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    texts: tuple[tuple[int, int], ...]  # rows and lengths of training
    rounds: int
    sparsity: float = 0.8
    rank: int = 64


def sizes_for(device: torch.device, rounds: int | None = None) -> Sizes:
    if device.type == "cpu":
        small = Decoder("tiny Llama", 64, 96, 2, 4, 2, 16, 101)
        return Sizes(False, small, torch.float32, (2,), (80,), (160,), ((2, 48),), rounds or 2)
    return Sizes(
        True, LLAMA_1B, torch.bfloat16, (1, 16, 64), (1024, 8192, 32768), (2048, 8192),
        ((8, 1024), (2, 4096)), rounds or 20,
    )  # fmt: skip
