"""The dense model and the pruned one whose speed is compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvprune import tiny
from kvprune.adapters import lora
from kvprune.adapters.load import load
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.adapters.resolve import resolve
from kvprune.errors import PruneError
from kvprune.evaluate.text_file import read_text
from kvprune.integration.handle import Pruned
from kvprune.integration.row_lora import twin

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelPair:
    """A dense model; if there is an adapter, the same model with pruning and a text to read."""

    dense: PreTrainedModel
    pruned: Pruned | None
    text: Tensor | None  # (tokens,)

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.dense.parameters())


def load_pair(
    name: str,
    adapter: str | None = None,
    text: Path | None = None,
    dtype: str = "auto",
    random: bool = False,
) -> ModelPair:
    """The models by name; `random`: its shape with random weights, without any download."""
    if random:
        if adapter is not None:
            raise PruneError("random weights have no adapter; leave out --adapter or --random")
        return ModelPair(_random_model(name, dtype), None, None)
    location = resolve(name, adapter)
    dense = load_base(location.base, dtype)
    if location.adapter is None:
        return ModelPair(dense, None, None)
    # LoRA is merged into the weights, which must then not be the dense model's
    folder = Path(location.adapter)
    shares_weights = folder.is_dir() and not lora.is_saved_in(folder)
    model = twin(dense) if shares_weights else load_base(location.base, dtype)
    pruned = load(model, location.adapter, merge=True)
    pruned.model.eval()
    return ModelPair(dense, pruned, _tokens(location.tokenizer, text or tiny.text_file("held_out")))


def _random_model(name: str, dtype: str) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    from kvprune.evaluate.cost.shape import load_config

    config = load_config(name)
    chosen = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.float32
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=chosen)
    model.eval()
    return model


def _tokens(name: str, file: Path) -> Tensor:
    ids = load_tokenizer(name)(read_text(file), verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)
