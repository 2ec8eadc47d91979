"""Models by name with their tokenizer: the one way in which every command gets them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvprune.adapters import saving
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.adapters.registry import find_adapter
from kvprune.config import DenseConfig
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned, attach


class Place(NamedTuple):
    """Where the parts of a model lie."""

    base: str  # the weights and the tokenizer
    adapter: str | Path | None  # what to attach; None: it is dense
    made_from: str | None = None  # of a whole fine-tuned model: the dense one it was before


@dataclass(frozen=True)
class Loaded:
    """A model as it was asked for, and where it comes from."""

    name: str
    adapter: str | None
    model: PreTrainedModel | Pruned
    tokenizer: PreTrainedTokenizerBase
    # what a whole fine-tuned model was made from; None: its weights are the base's
    base: str | None

    @property
    def host(self) -> PreTrainedModel:
        return self.model.model if isinstance(self.model, Pruned) else self.model

    def attached(self) -> Pruned:
        """The model with our cache; one without pruning gets it dense."""
        return self.model if isinstance(self.model, Pruned) else attach(self.model, DenseConfig())


def resolve(name: str, adapter: str | None = None) -> Place:
    """What a name stands for: an adapter of the package, what `kvprune train` wrote, or a base.

    A folder that training wrote needs no adapter: whole model or adapter, it says so itself.
    """
    if adapter is not None:
        return Place(name, adapter)
    if entry := find_adapter(name):
        return Place(entry.base.name, entry.name)
    if (Path(name) / saving.FILE).is_file():
        origin = saving.read(Path(name) / saving.FILE)[0]["base"]["name"]
        if saving.is_whole(Path(name)):
            return Place(name, name, origin)
        return Place(origin, name)
    return Place(name, None)


def load(
    name: str,
    adapter: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    merge: bool = False,
) -> Loaded:
    """A dense model, one with an adapter, or what `kvprune train` saved; on a GPU if there is one.

    `merge` folds LoRA into the weights: faster, but the dense model is no longer in it.
    """
    place = resolve(name, adapter)
    model: PreTrainedModel | Pruned
    if place.adapter is None:
        model = load_base(place.base, dtype)
    else:
        model = saving.load(place.base, place.adapter, merge, dtype)
    loaded = Loaded(name, adapter, model, load_tokenizer(place.base), place.made_from)
    move(loaded.host, device)
    return loaded


def move(model: PreTrainedModel, device: str | None) -> None:
    """To the device, by default to the GPU if there is one."""
    try:
        model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))  # type: ignore[arg-type]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PruneError(f"cannot put the model on {device!r}: {reason}; try cpu") from error
