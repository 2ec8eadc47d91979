"""The dense model to compare with, and what tells one set of weights from another."""

from __future__ import annotations

import hashlib
from typing import Literal

import torch
from transformers import PreTrainedModel

from kvprune.adapters.load import Loaded, move
from kvprune.adapters.pretrained import load_base
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned


def dense_beside(
    loaded: Loaded, name: str | None = None, dtype: str = "auto", device: str | None = None
) -> PreTrainedModel | Literal["open"] | None:
    """What to compare with: a model by name, or the one that this was made from.

    An adapter's is its own base with every gate open. A dense model is compared with nothing.
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
    """Changes with any weight: what a model measured must not mix with what it measures now."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
