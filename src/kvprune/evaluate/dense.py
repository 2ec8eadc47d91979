"""The dense model to compare with, and a digest of a model's weights."""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from transformers import PreTrainedModel

from kvprune.adapters.load import Loaded, move
from kvprune.adapters.pretrained import load_base
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned


def dense_reference(
    loaded: Loaded, name: str | None = None, dtype: str = "auto", device: str | None = None
) -> PreTrainedModel | Literal["open"] | None:
    """What to compare with: a model by name, or the base model. None for a dense model.

    The base model of an adapter is the model itself with every gate open ("open").
    """
    pruned = isinstance(loaded.model, Pruned) and loaded.model.config.prunes
    if name is None and not pruned:
        return None
    if name is None and loaded.base is None:
        return "open"
    try:
        model = load_base(name or str(loaded.base), dtype)
    except PruneError as error:
        raise PruneError(f"{error}; name another with --dense-model, or use --no-dense") from error
    move(model, device)
    return model


def identity(model: PreTrainedModel) -> str:
    """A digest of all weights: results of different weights must not mix."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
