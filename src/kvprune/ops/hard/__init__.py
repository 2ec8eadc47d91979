"""Hard attention: a query sees what no earlier token, nor it, has dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.attend.blocks import WIDEST
from kvprune.ops.dispatch import REFERENCE, Operation
from kvprune.ops.form import AttentionForm
from kvprune.ops.hard import reference

HARD_ATTENTION = Operation(
    reference.hard_attention,
    cpu=[torch.bfloat16],
    triton=[torch.float32, torch.bfloat16, torch.float16],
)


def hard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    drop_step: Tensor,
    form: AttentionForm,
    backend: str | None = None,
) -> Tensor:
    """See reference.hard_attention. Gradients and dropout are the reference's.

    On CPUs soft caps and sinks are, too; on GPUs heads of more than 256 numbers.
    """
    if backend is None and not _fits_kernel(q, k, v, form):
        backend = REFERENCE
    return HARD_ATTENTION.implementation(q, backend)(q, k, v, drop_step, form)


def _fits_kernel(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> bool:
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    if learns or form.dropout:
        return False
    if q.device.type != "cpu":
        return max(q.shape[-1], v.shape[-1]) <= WIDEST
    plain = form.softcap is None and form.sinks is None
    if not plain or q.dtype is not torch.bfloat16 or q.shape[-1] % 2:
        return False
    from kvprune.ops.hard.tile import has_bfloat16_products

    # without the instruction torch's own products in float32 are faster
    return has_bfloat16_products()
