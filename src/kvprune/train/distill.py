"""KL to the dense model's own predictions, a few rows of logits at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

IGNORE = -100
# tokens whose logits are in float32 at the same time: 256 × 50,000 × 4 bytes are 51 MB
CHUNK = 256


def kl_to_teacher(student: Tensor, teacher: Tensor, labels: Tensor, chunk: int = CHUNK) -> Tensor:
    """Σ KL(teacher ‖ student) over the positions that predict a label, in float32.

    student, teacher: (B, T, V), labels: (B, T). Divide by the number of labels for the mean.
    """
    predicts = F.pad(labels[:, 1:] != IGNORE, (0, 1))  # (B, T): the last token predicts nothing
    positions = predicts.flatten().nonzero().squeeze(-1).to(student.device)
    chunked_kl: Any = _ChunkedKL.apply
    total: Tensor = chunked_kl(
        student.flatten(0, 1), teacher.flatten(0, 1), torch.split(positions, chunk)
    )
    return total


class _ChunkedKL(torch.autograd.Function):
    """The gradient to the student's logits is p_student − p_teacher: known in the forward pass.

    So one tensor of the logits' own type is kept instead of several in float32.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, chunks: tuple[Tensor, ...]) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=student.device)
        grad = torch.zeros_like(student) if student.requires_grad else None
        for positions in chunks:
            log_q = student[positions].float().log_softmax(-1)
            log_p = teacher[positions].float().log_softmax(-1)
            p = log_p.exp()
            # a token that the teacher excludes (-inf) adds nothing: 0 · log 0 = 0
            total += (p * (log_p - log_q)).where(p > 0, 0.0).sum()
            if grad is not None:
                grad[positions] = (log_q.exp() - p).to(grad.dtype)
        ctx.save_for_backward(grad)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * upstream[0].to(grad.dtype), None, None


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it is now, for a run that is about to change it."""
    teacher = copy.deepcopy(model)
    torch.nn.Module.eval(teacher)
    torch.nn.Module.requires_grad_(teacher, False)
    return teacher
