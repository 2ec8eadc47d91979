"""One pruned layer: its place in the model and its weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from kvprune.methods.interaction import Interaction


@dataclass(frozen=True)
class Layer:
    """An attention module with pruning attached. It holds no state of a forward pass."""

    name: str  # of the attention module in the model
    index: int  # among all layers of the model, as its cache counts them
    number: int  # among the pruned layers
    interaction: Interaction | None


def layer_of(module: nn.Module) -> Layer | None:
    layer: Layer | None = module.__dict__.get("_kvprune")
    return layer
