"""Soft pruned attention, the path of training: exact, differentiable, O(T · block) memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kvprune.errors import PruneError
from kvprune.ops.attend.blocks import BLOCK, WIDEST, query_blocks
from kvprune.ops.attend.options import Forward, Options
from kvprune.ops.attend.reference import soft_backward, soft_forward
from kvprune.ops.dispatch import REFERENCE, Operation
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.timeline import Timeline

TRITON = "triton"
HALF_AND_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)
SOFT_FORWARD = Operation(soft_forward, triton=HALF_AND_FLOAT32)
SOFT_BACKWARD = Operation(soft_backward, triton=HALF_AND_FLOAT32)


def soft_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    votes: Sequence[tuple[Tensor, Tensor, Tensor]],
    timeline: Timeline,
    gate: Gate,
    form: AttentionForm,
    *,
    block: int = BLOCK,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention under the keep product, and the sum of keep over pairs j < k of each row.

    Paper, Eq. (new_attention):  softmax(q·k/√p + log keep) v, the same keep for all heads.
    `votes` holds (q_int/√r, k_int, β) of this layer; of all layers up to it when dropping is tied
    with depth, since then log keep is the sum over those layers (Eq. sparsity_with_depth). The
    output of a pad is finite and nothing else.
    q: (B, Hq, T, D), k, v: (B, Hkv, T, D), q_int, k_int: (B, T, R) → (B, Hq, T, D), (B,)
    """
    flat = [tensor for layer in votes for tensor in layer]
    seed = int(torch.randint(2**62, (), device="cpu")) if form.dropout else 0
    options = Options(timeline, gate, form._replace(sinks=None), block, backend, seed)
    # autocast would turn the products of scores into half precision
    with torch.autocast(q.device.type, enabled=False):
        return _soft_attention(q, k, v, form.sinks, options, *flat)


class _SoftAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        options: Options,
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor]:
        done = forward(q, k, v, sinks, flat, options)
        # the output only where it is looked at again
        own = done.out if done.lse.numel() else done.lse
        ctx.save_for_backward(q, k, v, sinks, own, done.keep_sum, done.carries, done.lse, *flat)
        ctx.options = options
        return done.out, done.keep_sum

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor, grad_keep_sum: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, *rest = ctx.saved_tensors
        done, flat = Forward(*rest[:4]), rest[4:]
        grads = backward(q, k, v, sinks, flat, done, grad_out, grad_keep_sum, ctx.options)
        return *grads[:4], None, *grads[4:]


_soft_attention: Callable[..., tuple[Tensor, Tensor]] = _SoftAttention.apply


def forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, flat: Sequence[Tensor], options: Options
) -> Forward:
    """The pass without a graph, by the backend that fits."""
    implementation = SOFT_FORWARD.implementation(q, choose(q, v, flat, options.backend))
    return implementation(q, k, v, sinks, flat, options)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    flat: Sequence[Tensor],
    done: Forward,
    grad_out: Tensor,
    grad_keep_sum: Tensor,
    options: Options,
) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v, of the sinks if any, and of the votes."""
    implementation = SOFT_BACKWARD.implementation(q, choose(q, v, flat, options.backend))
    return implementation(q, k, v, sinks, flat, done, grad_out, grad_keep_sum, options)


def choose(q: Tensor, v: Tensor, flat: Sequence[Tensor], backend: str | None) -> str:
    """Triton's kernels where they take such tensors, and everywhere else plain torch.

    Of the latter only the gate and its running sum have kernels: those are what "cpu" names.
    """
    wanted = SOFT_FORWARD.best_backend(q) if backend is None else backend
    if wanted != TRITON:
        return REFERENCE
    reason = refusal(q, v, flat)
    if reason and backend == TRITON:
        raise PruneError(f"{reason}; use None to choose by the tensors")
    return REFERENCE if reason else TRITON


def refusal(q: Tensor, v: Tensor, flat: Sequence[Tensor]) -> str | None:
    """Why Triton's kernels cannot take tensors whose dtype and device fit; None if they can."""
    widest = max(q.shape[-1], v.shape[-1], flat[0].shape[-1])
    if widest > WIDEST:
        return f"the triton backend takes heads and votes up to {WIDEST} numbers, not {widest}"
    if any(x.dtype != torch.float32 for x in flat):
        return f"the triton backend takes votes in float32, not {flat[0].dtype}"
    return None


def remembered(
    q: Tensor, v: Tensor, flat: Sequence[Tensor]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of what is remembered for the backward pass, carries and lse, in a graph."""
    B, H, T, _ = q.shape
    if choose(q, v, flat, None) == TRITON:
        from kvprune.ops.attend.triton_tiles import stripe, tiles_for

        count = len(range(0, T, stripe(B, T, tiles_for(q, v, flat[0]).block)))
        return (count, len(flat) // 3, B, T), (B, H, T)
    return (len(query_blocks(T)), len(flat) // 3, B, T), (0,)
