"""Models by name, ready to be measured: pruned or dense, and the dense one to compare with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvprune import saving
from kvprune.config import DenseConfig
from kvprune.errors import PruneError
from kvprune.pretrained import load_base, load_tokenizer
from kvprune.pruned import Pruned


@dataclass(frozen=True)
class Loaded:
    """A model as it was asked for, and where it comes from."""

    name: str
    adapter: str | None
    model: PreTrainedModel | Pruned
    tokenizer: PreTrainedTokenizerBase
    base: (
        str | None
    )  # what a whole fine-tuned model was made from; None: its weights are the base's

    @property
    def host(self) -> PreTrainedModel:
        return self.model.model if isinstance(self.model, Pruned) else self.model


def load(
    name: str, adapter: str | None = None, dtype: str = "auto", device: str | None = None
) -> Loaded:
    """A dense model, one with an adapter, or what `kvprune train` saved; on a GPU if there is one.

    A folder that training wrote needs no adapter: whole model or adapter, it says so itself.
    """
    base = None
    model: PreTrainedModel | Pruned
    if adapter is not None:
        model, words = saving.load(name, adapter, dtype=dtype), name
    elif (Path(name) / saving.FILE).is_file():
        model, words = saving.load(name, dtype=dtype), name
        origin = saving.read(Path(name) / saving.FILE)[0]["base"]["name"]
        if (Path(name) / "config.json").is_file():
            base = origin
        else:
            words = origin
    else:
        model, words = load_base(name, dtype), name
    loaded = Loaded(name, adapter, model, load_tokenizer(words), base)
    _move(loaded.host, device)
    return loaded


def dense_beside(
    loaded: Loaded, name: str | None = None, dtype: str = "auto", device: str | None = None
) -> PreTrainedModel | Literal["open"] | None:
    """What to compare with: a model by name, or the one that this was made from.

    An adapter's is its own base with every gate open. A dense model is compared with nothing.
    """
    pruned = isinstance(loaded.model, Pruned) and not isinstance(loaded.model.config, DenseConfig)
    if name is None and not pruned:
        return None
    if name is None and loaded.base is None:
        return "open"
    try:
        model = load_base(name or str(loaded.base), dtype)
    except PruneError as error:
        raise PruneError(f"{error}; name another with --dense-model, or use --no-dense") from error
    _move(model, device)
    return model


def identity(model: PreTrainedModel) -> str:
    """Changes with any weight: what a model measured must not mix with what it measures now."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _move(model: PreTrainedModel, device: str | None) -> None:
    try:
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PruneError(f"cannot put the model on {device!r}: {reason}; try cpu") from error
