"""Fold a saved LoRA into a model's weights without peft, which takes longer than the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvprune.adapters.lora import CONFIG, WEIGHTS

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# settings of peft that change nothing about W + B A · alpha / r; any other that is set does
HARMLESS = frozenset({
    "base_model_name_or_path", "bias", "exclude_modules", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
    "peft_type", "peft_version", "qalora_group_size", "r", "revision", "target_modules",
    "task_type",
})  # fmt: skip


@torch.no_grad()
def fold(model: PreTrainedModel, folder: Path) -> bool:
    """Add the LoRA in the folder to the weights: W + B A · alpha / r.

    In float32 that is peft's merge bit for bit; in half precision the sum is rounded once, where
    peft rounds both terms.

    False, and nothing is changed, if it is not a plain LoRA on linear layers of this model: peft
    knows the other kinds, and says what is wrong with the rest.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    pairs = _pairs(model, load_file(folder / WEIGHTS)) if _is_plain(config) else None
    if pairs is None:
        return False
    scaling = config["lora_alpha"] / config["r"]
    for linear, down, up in pairs:
        # not in place: the weights are pages of their file, and to copy each one as it is written
        # to takes five times as long as to fill a new tensor
        merged = (up @ down).mul_(scaling).add_(linear.weight)
        linear.weight.data = merged.to(linear.weight.dtype)
    return True


def _is_plain(config: dict[str, Any]) -> bool:
    set_otherwise = {name for name, value in config.items() if value and name not in HARMLESS}
    return config.get("peft_type") == "LORA" and config.get("bias") == "none" and not set_otherwise


def _pairs(
    model: PreTrainedModel, tensors: dict[str, Tensor]
) -> list[tuple[nn.Linear, Tensor, Tensor]] | None:
    """Each linear layer with its two factors in float32; None if one of them does not fit."""
    modules = dict(model.named_modules())
    names = {name.removesuffix(A) for name in tensors if name.endswith(A)}
    if len(tensors) != 2 * len(names) or not tensors.keys() >= {name + B for name in names}:
        return None
    pairs = []
    for name in sorted(names):
        linear = modules.get(name.removeprefix(PREFIX))
        down, up = tensors[name + A].float(), tensors[name + B].float()
        # a subclass, of a quantised layer for instance, may store its weight differently
        if type(linear) is not nn.Linear or linear.weight.shape != (len(up), down.shape[1]):
            return None
        pairs.append((linear, down.to(linear.weight.device), up.to(linear.weight.device)))
    return pairs
