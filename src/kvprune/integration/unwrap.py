"""The transformers model and its pruning, from either of them."""

from __future__ import annotations

from transformers import PreTrainedModel

from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned
from kvprune.integration.layer import layer_of


def unwrap(model: PreTrainedModel | Pruned) -> tuple[PreTrainedModel, Pruned | None]:
    """The model itself, and its Pruned; None if it is dense.

    A bare model that has pruning attached is refused: without its Pruned it cannot be controlled.
    """
    if isinstance(model, Pruned):
        return model.model, model
    if any(layer_of(module) for module in model.modules()):
        raise PruneError(
            f"this {type(model).__name__} has pruning attached; pass the Pruned that attach or "
            f"load returned"
        )
    return model, None
