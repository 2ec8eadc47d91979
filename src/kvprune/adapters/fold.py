"""A saved LoRA folded into a model's weights, or beside them: without peft, which takes longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvprune.adapters.lora import CONFIG, WEIGHTS
from kvprune.errors import PruneError
from kvprune.integration.row_lora import put_beside

Pair: TypeAlias = tuple[nn.Linear, Tensor, Tensor]
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
    found = _read(model, folder)
    if found is None:
        return False
    pairs, scaling = found
    for linear, down, up in pairs:
        # not in place: the weights are pages of their file, and to copy each one as it is written
        # to takes five times as long as to fill a new tensor
        merged = (up @ down).mul_(scaling).add_(linear.weight)
        linear.weight.data = merged.to(linear.weight.dtype)
    return True


@torch.no_grad()
def lay_beside(model: PreTrainedModel, folder: Path) -> None:
    """Put the LoRA in the folder beside the weights, which other models may use too."""
    found = _read(model, folder)
    output = model.get_output_embeddings()
    if found is None or any(linear is output for linear, _, _ in found[0]):
        raise PruneError(
            f"the LoRA in {folder} is not a plain one on the linear layers before the output, so "
            f"it cannot share its base with other adapters; serve it by itself"
        )
    pairs, scaling = found
    for linear, down, up in pairs:
        put_beside(linear, down, up * scaling)


def _read(model: PreTrainedModel, folder: Path) -> tuple[list[Pair], float] | None:
    """Layers with their factors, and the scale; None unless it is plain LoRA on linear layers."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    pairs = _pairs(model, load_file(folder / WEIGHTS)) if _is_plain(config) else None
    return None if pairs is None else (pairs, config["lora_alpha"] / config["r"])


def _is_plain(config: dict[str, Any]) -> bool:
    set_otherwise = {name for name, value in config.items() if value and name not in HARMLESS}
    return config.get("peft_type") == "LORA" and config.get("bias") == "none" and not set_otherwise


def _pairs(model: PreTrainedModel, tensors: dict[str, Tensor]) -> list[Pair] | None:
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
