"""A model's linear layers for decoding on a CPU, where few rows are multiplied at a time."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvprune.ops.linear import MOST_ROWS, STORED, linear, linear_in_graph
from kvprune.ops.linear.packed import Packed, can_pack
from kvprune.utils.handles import owner_of
from kvprune.utils.memory import available

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]

# share of the free memory that a second copy of the weights may take
MOST_MEMORY = 0.25
# for so many rows our kernel is faster than packed weights
UNPACKED_ROWS = 2


def speed_up(model: nn.Module, pack: bool = True) -> None:
    """From now on the model multiplies few rows by our kernel; gradients, by torch.

    pack: keep a copy of the weights in oneDNN's order too, where the machine computes in bfloat16
    and has the memory: faster for any number of rows. Sums are taken in another order, so outputs
    differ by rounding. Only plain linear layers: one that a library has replaced or quantised is
    left alone. `slow_down` undoes it.
    """
    own = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)]
    fits = [module for module in own if pack and can_pack(module.weight)]
    if sum(module.weight.nbytes for module in fits) > MOST_MEMORY * available():
        fits = []
    for module in own:
        module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
    for module in fits:
        module.__dict__["_packed"] = Packed(module.weight)


def slow_down(model: nn.Module) -> None:
    """Take it off again."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) is _forward:
            del module.forward
            module.__dict__.pop("_packed", None)


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = self.weight, self.bias
    packed: Packed | None = self.__dict__.get("_packed")
    if torch.compiler.is_compiling():
        if packed is not None and x.dtype is torch.bfloat16 and _is_plain(x, weight):
            return packed_in_graph(packed.handle, x, weight, bias)
        return _few(linear_in_graph, x, weight, bias)
    if packed is not None and _can_use(packed, x, weight):
        return packed.linear(x, bias)
    return _few(linear, x, weight, bias)


def _few(product: Product, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not _fits(x, weight):
        return F.linear(x, weight, bias)
    return product(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], len(weight))


def _can_use(packed: Packed, x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() > UNPACKED_ROWS * x.shape[-1]
        and x.dtype is torch.bfloat16
        and packed.is_of(weight)
        and _is_plain(x, weight)
    )


# a graph is traced once, for any number of rows and whatever becomes of the weights: both are
# looked at when it runs
LIBRARY = torch.library.Library("kvprune", "FRAGMENT")
LIBRARY.define("packed_linear(Tensor packed, Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def packed_in_graph(handle: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`_forward` of a layer with packed weights, as an operator of torch."""
    out: Tensor = torch.ops.kvprune.packed_linear(handle, x, weight, bias)
    return out


def _packed_linear(handle: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    packed: Packed = owner_of(handle)
    if _can_use(packed, x, weight):
        return packed.linear(x, bias)
    return _few(linear, x, weight, bias)


def _fake(handle: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


LIBRARY.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
torch.library.register_fake("kvprune::packed_linear", _fake, lib=LIBRARY)


def _fits(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() <= MOST_ROWS * x.shape[-1]
        and x.device.type == weight.device.type == "cpu"
        and x.dtype is weight.dtype
        and x.dtype in STORED
        and weight.is_contiguous()
        and _is_plain(x, weight)
    )


def _is_plain(x: Tensor, weight: Tensor) -> bool:
    """Neither gradients nor another precision are wanted."""
    learns = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return not learns and not torch.is_autocast_enabled("cpu")
