"""A model's norms and gated activations on a CPU, each in one pass over the memory."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvprune.integration.host import GATED_MLP, is_gated_mlp, is_rms_norm, norm_epsilon
from kvprune.ops.norm import STORED, rms_norm
from kvprune.ops.norm import reference as norm_reference
from kvprune.ops.swiglu import reference as swiglu_reference
from kvprune.ops.swiglu import swiglu

# the size of a probe's rows, for layers that it may choose
WIDTH = 8


def fuse(model: nn.Module) -> None:
    """From now on the model computes RMSNorm and silu(gate) · up by our kernels; gradients, not.

    Only modules that compute just this, which a probe with other weights shows, and which no
    library has replaced. Outputs differ by rounding. `unfuse` undoes it.
    """
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if is_rms_norm(module) and _is_proved(_computes_rms_norm, module):
            module.forward = types.MethodType(_norm, module)
        elif is_gated_mlp(module) and _is_proved(_computes_gated_mlp, module):
            module.forward = types.MethodType(_mlp, module)


def unfuse(model: nn.Module) -> None:
    """Take it off again."""
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) in (_norm, _mlp):
            del module.forward


def _norm(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() and len(args) == 1 and not kwargs:
        x, weight = args[0], self._parameters["weight"]
        if weight is not None and _fits(x, weight):
            return rms_norm(x, weight, norm_epsilon(self))
    return type(self).forward(self, *args, **kwargs)


def _mlp(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling() or len(args) != 1 or kwargs:
        return type(self).forward(self, *args, **kwargs)
    parts: Any = self._modules
    gate_proj, up_proj, down_proj, activation = (parts[name] for name in GATED_MLP)
    gate, up = gate_proj(args[0]), up_proj(args[0])
    # whoever looks at the activation from outside wants it to be called
    watched = activation._forward_hooks or activation._forward_pre_hooks
    if not watched and _fits(gate, up):
        return down_proj(swiglu(gate, up))
    return down_proj(activation(gate) * up)


def _fits(x: Tensor, other: Tensor) -> bool:
    """The kernels take them, and neither gradients nor another precision are wanted."""
    learns = torch.is_grad_enabled() and (x.requires_grad or other.requires_grad)
    return (
        x.device.type == other.device.type == "cpu"
        and x.dtype is other.dtype
        and x.dtype in STORED
        and not learns
        and not torch.is_autocast_enabled("cpu")
    )


@torch.no_grad()
def _is_proved(probe: Callable[[nn.Module, Tensor], bool], module: nn.Module) -> bool:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(5, 64, 64, generator=generator)
    # in both dtypes: models differ in where they round, and may be converted later
    try:
        return all(probe(module, noise.to(dtype)) for dtype in STORED)
    except Exception:  # it needs more than a module of this kind has
        return False


def _computes_rms_norm(module: nn.Module, noise: Tensor) -> bool:
    width = module.get_parameter("weight").numel()
    numbers = noise.flatten().repeat(-(-4 * width // noise.numel()))[: 4 * width]
    x, weight = numbers.view(4, width).split([3, 1])
    # small rows, where epsilon counts, and large ones
    x = x * torch.tensor([[1e-3], [1.0], [30.0]], dtype=x.dtype)
    twin = copy.copy(module)
    twin.__dict__["_parameters"] = {"weight": weight[0]}
    want = norm_reference.rms_norm(x, weight[0], norm_epsilon(module))
    return _same(type(module).forward(twin, x), want)


def _computes_gated_mlp(module: nn.Module, noise: Tensor) -> bool:
    x, gate, up, down = (part[:WIDTH, :WIDTH] for part in noise[:4])
    # large enough to find a bound on the gates
    x = x * 30
    projections = (partial(F.linear, weight=weight) for weight in (gate, up, down))
    twin = copy.copy(module)
    twin.__dict__["_modules"] = dict(zip(GATED_MLP, (*projections, F.silu), strict=True))
    want = F.linear(swiglu_reference.swiglu(F.linear(x, gate), F.linear(x, up)), down)
    return _same(type(module).forward(twin, x), want)


def _same(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.dtype is want.dtype and torch.equal(got, want)
