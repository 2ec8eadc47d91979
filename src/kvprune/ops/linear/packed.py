"""Linear layers whose weights were put in order for oneDNN once, and not at every call.

torch keeps weights as they are written in files, and oneDNN orders them anew each time: with 16
rows that takes as long as the product (`benchmarks/linear.py`). The ordered weights are a copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvprune.utils.handles import new_handle


def can_pack(weight: Tensor) -> bool:
    """Whether this machine and this torch can: bfloat16 on a CPU whose oneDNN computes in it."""
    ops = torch.ops.mkldnn
    return (
        weight.device.type == "cpu"
        and weight.dtype is torch.bfloat16
        and weight.dim() == 2
        and torch.backends.mkldnn.is_available()
        and hasattr(ops, "_linear_pointwise")
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_is_mkldnn_bf16_supported")
        and bool(ops._is_mkldnn_bf16_supported())
    )


class Packed:
    """The weights of a linear layer in oneDNN's order."""

    def __init__(self, weight: Tensor):
        self._of, self._version = weight, weight._version
        self.handle = new_handle(self)
        # the number of rows is a hint, and all give the same order here
        self._ordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 16)

    def is_of(self, weight: Tensor) -> bool:
        """Whether these are still the layer's weights: they may have been replaced, or changed."""
        return weight is self._of and weight._version == self._version

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b, for x (..., width)."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._ordered, bias, "none", [], "")
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied model has other weights, and no order of them."""
        return None

    def __reduce__(self) -> Any:
        return type(None), ()
