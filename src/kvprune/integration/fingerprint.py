"""A fingerprint of a model, pruned or dense: what decides which cache it would build."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvprune.integration.handle import Pruned

# numbers of a large weight that are looked at: its ends, and some between them
SAMPLE = 64


def fingerprint(model: PreTrainedModel, pruned: Pruned | None = None) -> dict[str, Any]:
    """Of the host's weights, of what was trained for pruning, and the settings in force.

    Weights are sampled: two models that were trained apart differ everywhere.
    """
    dtype = {"dtype": str(model.dtype).removeprefix("torch.")}
    if pruned is None:
        return {"model": _hash(model.named_parameters()), **dtype}
    own = {id(x) for module in pruned.interactions for x in module.parameters()}
    tensors = list(model.named_parameters())
    host = [(name, x) for name, x in tensors if id(x) not in own]
    adapter = [(name, x) for name, x in tensors if id(x) in own]
    return {
        "model": _hash(host),
        "adapter": _hash(adapter),
        **{f"method.{name}": value for name, value in pruned.working.to_dict().items()},
        **dtype,
    }


def _hash(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(len(flat) // SAMPLE, 1)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]
