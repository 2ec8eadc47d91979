"""A model's linear layers by our kernel, where it has few rows to multiply: decoding on a CPU."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvprune.ops.linear import MOST_ROWS, STORED, linear, linear_in_graph


def speed_up(model: nn.Module) -> None:
    """From now on the model multiplies few rows by our kernel; more rows, or gradients, by torch.

    Sums are taken in another order, so outputs differ by rounding. Only plain linear layers: one
    that a library has replaced or quantised is left alone. `slow_down` undoes it.
    """
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]


def slow_down(model: nn.Module) -> None:
    """Take it off again."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is _forward:
            del module.forward


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = self.weight, self.bias
    if not _fits(x, weight):
        return F.linear(x, weight, bias)
    product = linear_in_graph if torch.compiler.is_compiling() else linear
    return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


def _fits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() <= MOST_ROWS * x.shape[-1]
        and x.device.type == weight.device.type == "cpu"
        and x.dtype is weight.dtype
        and x.dtype in STORED
        and weight.is_contiguous()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled("cpu")
    )
