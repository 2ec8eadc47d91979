"""Soft attention as an operator of torch, for `torch.compile`; eager code needs none of this."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvprune.ops.attend.blocks import BLOCK
from kvprune.ops.attend.options import Forward, Options
from kvprune.ops.attend.soft import TRITON, backward, choose, forward, remembered
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.timeline import Timeline


def soft_attention_in_graph(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    votes: Sequence[tuple[Tensor, Tensor, Tensor]],
    timeline: Timeline,
    gate: Gate,
    form: AttentionForm,
) -> tuple[Tensor, Tensor]:
    """`soft_attention`; α of the gate is a tensor (), so that another one needs no other graph."""
    flat = [tensor for layer in votes for tensor in layer]
    seed = torch.randint(2**62, ()) if form.dropout else torch.zeros((), dtype=torch.long)
    out, keep_sum, _, _ = _forward(
        q, k, v, form.sinks, flat, timeline.clock, timeline.visible_from, timeline.votable_from,
        timeline.padded, gate.kind, gate.alpha, form.scaling, form.softcap, form.dropout, seed,
    )  # fmt: skip
    return out, keep_sum


@torch.library.custom_op("kvprune::soft_attention", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    votes: Sequence[Tensor],
    clock: Tensor,
    visible_from: Tensor,
    votable_from: Tensor,
    padded: bool,
    kind: str,
    alpha: Tensor,
    scaling: float,
    softcap: float | None,
    dropout: float,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = _options(
        clock, visible_from, votable_from, padded, kind, alpha, scaling, softcap, dropout, seed
    )
    done = forward(q, k, v, sinks, votes, options)
    return done.out, done.keep_sum, done.carries, done.lse


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, votes: Sequence[Tensor], *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, H, T, _ = q.shape
    carries, lse = remembered(q, v, votes)
    numbers = votes[0]
    return (
        q.new_empty(B, H, T, v.shape[-1]),
        numbers.new_empty(B),
        numbers.new_empty(carries),
        numbers.new_empty(lse),
    )


@torch.library.custom_op("kvprune::soft_attention_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    votes: Sequence[Tensor],
    clock: Tensor,
    visible_from: Tensor,
    votable_from: Tensor,
    padded: bool,
    kind: str,
    alpha: Tensor,
    scaling: float,
    softcap: float | None,
    dropout: float,
    seed: Tensor,
    out: Tensor,
    carries: Tensor,
    lse: Tensor,
    grad_out: Tensor,
    grad_keep_sum: Tensor,
) -> list[Tensor]:
    options = _options(
        clock, visible_from, votable_from, padded, kind, alpha, scaling, softcap, dropout, seed
    )
    # the sum of keep itself is not looked at again
    done = Forward(out, grad_keep_sum, carries, lse)
    grads = backward(q, k, v, sinks, votes, done, grad_out, grad_keep_sum, options)
    return [grad for grad in grads if grad is not None]


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, votes: Sequence[Tensor], *rest: Any
) -> list[Tensor]:
    packed = choose(q, v, votes, None) == TRITON
    layout = torch.contiguous_format if packed else torch.preserve_format
    given = (x for x in (q, k, v, sinks, *votes) if x is not None)
    return [torch.empty_like(x, memory_format=layout) for x in given]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, sinks, votes, clock, visible_from, votable_from, *rest = inputs
    padded, kind, alpha, scaling, softcap, dropout, seed = rest
    ctx.rules = padded, kind, scaling, softcap, dropout
    ctx.votes = len(votes)
    out, _, carries, lse = output
    own = out if lse.numel() else lse
    ctx.save_for_backward(
        q, k, v, sinks, *votes, clock, visible_from, votable_from, alpha, seed, own, carries, lse
    )


def _differentiate(
    ctx: Any, grad_out: Tensor, grad_keep_sum: Tensor, *_: Tensor
) -> tuple[Any, ...]:
    q, k, v, sinks, *rest = ctx.saved_tensors
    votes, (clock, visible_from, votable_from, alpha, seed, *done) = rest[:-8], rest[-8:]
    padded, kind, scaling, softcap, dropout = ctx.rules
    grads = _backward(
        q, k, v, sinks, votes, clock, visible_from, votable_from, padded, kind, alpha, scaling,
        softcap, dropout, seed, *done, grad_out, grad_keep_sum,
    )  # fmt: skip
    own = grads[3] if sinks is not None else None
    return *grads[:3], own, grads[-len(votes) :], *[None] * 10


_forward.register_autograd(_differentiate, setup_context=_save)


def _options(
    clock: Tensor,
    visible_from: Tensor,
    votable_from: Tensor,
    padded: bool,
    kind: str,
    alpha: Tensor,
    scaling: float,
    softcap: float | None,
    dropout: float,
    seed: Tensor,
) -> Options:
    return Options(
        Timeline(clock, visible_from, votable_from, padded), Gate(kind, float(alpha)),
        AttentionForm(scaling, softcap, dropout), BLOCK, None, int(seed),
    )  # fmt: skip
