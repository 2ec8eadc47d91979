"""bfloat16 on a CPU that has no instructions for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


def is_emulated() -> bool:
    """Whether this CPU has no instructions for products of bfloat16."""
    return not torch.cpu._is_avx512_bf16_supported()


def multiply_in_float32(model: nn.Module) -> None:
    """Compute the products outside of attention in float32; apply it to every contestant alike.

    Where bfloat16 is emulated, torch multiplies GPT-2's matrices 70 times slower than in float32:
    that would be nearly all of a step, and attention, dense or pruned, too little to be seen.
    """
    for module in model.modules():
        if isinstance(module, Conv1D | nn.Linear):
            weight = module.weight.detach().float()
            weight = weight.T.contiguous() if isinstance(module, Conv1D) else weight
            bias = None if module.bias is None else module.bias.detach().float()
            module.forward = _linear(weight, bias)  # type: ignore[method-assign]


def _linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.linear(x.float(), weight, bias).to(x.dtype)
