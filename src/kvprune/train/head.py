"""The KL from the last hidden states: the output layer is applied to a few positions at a time.

A model of a small width and a large vocabulary spends much of a step on logits. Where the output
layer is frozen, teacher and student share it, so the teacher's hidden states say all that its
logits would, in a fraction of the size, and no logits need to be stored at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

# positions whose logits exist at the same time: 128 × 50,000 × 4 bytes are 26 MB
CHUNK = 128
PROBE = 4  # tokens to compare the two ways on


@torch.no_grad()
def frozen_head(model: PreTrainedModel) -> nn.Linear | None:
    """The output layer, if logits are this layer of the last hidden states and it is not trained.

    Some models scale or cap their logits; so it is tried out on a few tokens.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.weight.requires_grad:
        return None
    ids = torch.arange(PROBE, device=head.weight.device)[None]
    training = model.training
    nn.Module.eval(model)
    try:
        out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    finally:
        nn.Module.train(model, training)
    logits = head(out.hidden_states[-1])
    return head if torch.allclose(logits, out.logits, rtol=1e-3, atol=1e-3) else None


def last_hidden(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """What the output layer reads, (B, T, D); logits are computed for one position only."""
    out = model(**inputs, output_hidden_states=True, logits_to_keep=1)
    hidden: Tensor = out["hidden_states"][-1]
    return hidden


def hidden_kl(student: Tensor, teacher: Tensor, head: nn.Linear, chunk: int = CHUNK) -> Tensor:
    """Σ KL(teacher ‖ student) over positions, each from its hidden state: (N, D) both.

    Under autocast the products are in its type; softmax and sum are in float32.
    """
    device = student.device.type
    half = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if half else student.dtype
    bias = None if head.bias is None else head.bias.to(dtype)
    chunked: Any = _HiddenKL.apply
    with torch.autocast(device, enabled=False):
        total: Tensor = chunked(student, teacher, head.weight.to(dtype), bias, chunk)
    return total


class _HiddenKL(torch.autograd.Function):
    """The gradient to the student's logits is p_student − p_teacher: known in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, weight: Tensor, bias: Tensor | None, chunk: int
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        grad = torch.empty_like(student)
        for start in range(0, len(student), chunk):
            rows = slice(start, start + chunk)
            log_q = _log_softmax(student[rows], weight, bias)  # (chunk, V)
            log_p = _log_softmax(teacher[rows], weight, bias)
            p = log_p.exp()
            total += log_p.sub_(log_q).mul_(p).sum()
            grad[rows] = (log_q.exp_().sub_(p).to(weight.dtype) @ weight).to(grad.dtype)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * upstream[0].to(grad.dtype), None, None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(hidden.to(weight.dtype), weight, bias).float().log_softmax(-1)
