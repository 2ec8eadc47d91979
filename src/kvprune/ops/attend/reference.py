"""Soft pruned attention in plain torch, on any device: a block of queries at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvprune.ops.attend.blocks import (
    Scratch,
    alive_keys,
    at_least_float32,
    give,
    group_heads,
    query_blocks,
    row_groups,
    softmax_with_sinks_,
    take,
    ungroup_heads,
    work_dtype,
)
from kvprune.ops.attend.options import Forward, Options
from kvprune.ops.keep import log_keep, log_keep_backward
from kvprune.ops.timeline import Timeline


def soft_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    flat: Sequence[Tensor],
    options: Options,
) -> Forward:
    """See `soft_attention`; with the carries the backward pass can redo any block by itself."""
    B, _, T, _ = q.shape
    votes = [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)]
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    keep_sum = flat[0].new_zeros(B)
    blocks = query_blocks(T, options.block)
    carries = flat[0].new_zeros(len(blocks), len(votes), B, T)
    scratch = (Scratch(q, options.block),)
    for rows in row_groups(q):
        row = _Row(q, k, v, sinks, votes, options, rows, scratch)
        for i, block in enumerate(blocks):
            part = row.recompute(block, carries[i, :, rows])
            out[rows, :, block] = row.output(part)
            keep_sum[rows] += part.keep_sum()
            if i + 1 < len(blocks):
                carries[i + 1, :, rows] = part.carry
    return Forward(out, keep_sum, carries, lse=carries.new_empty(0))


def soft_backward(
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
    votes, carries = [tuple(flat[i : i + 3]) for i in range(0, len(flat), 3)], done.carries
    grads = [torch.zeros_like(x, dtype=work_dtype(x)) for x in (q, k, v)]
    sinks_grad = None if sinks is None else torch.zeros_like(at_least_float32(sinks))
    vote_grads = [tuple(torch.zeros_like(x) for x in layer) for layer in votes]
    blocks = query_blocks(q.shape[2], options.block)
    scratch = (Scratch(q, options.block), Scratch(q, options.block))
    for rows in row_groups(q):
        row = _Row(q, k, v, sinks, votes, options, rows, scratch)
        # d loss / d carry after the current block, one per layer of votes
        carry_grad = [torch.zeros_like(carries[0, 0, rows]) for _ in votes]
        for i, block in reversed(list(enumerate(blocks))):
            part = row.recompute(block, carries[i, :, rows])
            bias_grad = row.attention_backward(
                part, grad_out[rows, :, block], [g[rows] for g in grads], sinks_grad
            )
            bias_grad += grad_keep_sum[rows, None, None] * part.bias.exp()
            row.votes_backward(part, bias_grad, carry_grad, vote_grads)
    flat_grads = [g for layer in vote_grads for g in layer]
    if sinks is not None and sinks_grad is not None:
        sinks_grad = sinks_grad.to(sinks.dtype)
    qkv_grads = [g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)]
    return *qkv_grads, sinks_grad, *flat_grads


@dataclass
class _Part:
    """One block of queries against the keys alive for it, recomputed from its carry."""

    block: slice
    keys: Tensor | None  # indices (S,), None: all before the block's end
    time: Timeline  # of the block's queries and those keys
    scores: list[Tensor]  # (B, Q, S), one per layer of votes
    bias: Tensor  # log keep, (B, Q, S)
    carry: Tensor  # log keep after the block, (layers of votes, B, T)
    weights: Tensor  # softmax, (B, Hkv, G·Q, S); lives until the next block is computed
    tanh: Tensor | None  # soft-capped logits / softcap, as weights

    def keep_sum(self) -> Tensor:
        # every real query sees itself with keep 1, and a pad's row of zeros is no pair at all
        real = self.time.clock >= 0
        keep = self.bias.exp().sum(-1)
        return ((keep - 1) * real).sum(-1)


class _Row:
    """The rows of one group, processed block by block."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        votes: Any,
        options: Options,
        rows: slice,
        scratch: tuple[Scratch, ...],
    ):
        dtype = work_dtype(q)
        self.q = q[rows].to(dtype)
        self.k, self.v = k[rows].to(dtype), v[rows].to(dtype)
        self.sinks, self.votes, self.rows = sinks, votes, rows
        self.time, self.options, self.form = options.timeline.rows(rows), options, options.form
        self.heads, self.kv_heads, self.scratch = q.shape[1], k.shape[1], scratch

    def recompute(self, block: slice, carry: Tensor) -> _Part:
        options, time, stop = self.options, self.time, block.stop
        alive = (carry.sum(0) > -torch.inf)[:, :stop]  # an exact zero stays zero: skip those keys
        if time.padded:
            alive = alive & (time.clock[:, :stop] >= 0)
        keys = alive_keys(alive)
        time = replace(
            time,
            clock=time.clock[:, block],
            visible_from=take(time.visible_from, keys, stop, 1),
            votable_from=take(time.votable_from, keys, stop, 1),
        )

        bias: Tensor | None = None
        scores, carry = [], carry.clone()
        for layer, (q_int, k_int, beta) in enumerate(self.votes):
            k_alive = take(k_int[self.rows], keys, stop, 1)
            score = torch.baddbmm(
                beta.expand(1, 1, 1), q_int[self.rows, block], k_alive.transpose(1, 2)
            )
            old = take(carry[layer], keys, stop, 1)
            log, new = log_keep(score, old, time, options.gate, options.backend)
            if keys is None:
                carry[layer, :, :stop] = new
            else:
                carry[layer].index_copy_(1, keys, new)
            bias = log if bias is None else bias.add_(log)
            scores.append(score)
        assert bias is not None

        q = group_heads(self.q[:, :, block] * self.form.scaling, self.kv_heads)
        logits = self.scratch[0].product(q, take(self.k, keys, stop, 2).transpose(2, 3))
        tanh = None
        if self.form.softcap is not None:
            tanh = (logits / self.form.softcap).tanh_()
            torch.mul(tanh, self.form.softcap, out=logits)
        ungroup_heads(logits, self.heads).add_(bias[:, None])
        weights = softmax_with_sinks_(logits, self.sinks)
        return _Part(block, keys, time, scores, bias, carry, weights, tanh)

    def dropped(self, part: _Part) -> Tensor | None:
        """The dropout factors of the block's weights; the same whenever it is recomputed."""
        if not self.form.dropout:
            return None
        random = torch.Generator(device=part.weights.device)
        random.manual_seed((self.options.seed + 7919 * self.rows.start + part.block.start) % 2**63)
        stay = 1 - self.form.dropout
        return torch.empty_like(part.weights).bernoulli_(stay, generator=random).div_(stay)

    def output(self, part: _Part) -> Tensor:
        factors = self.dropped(part)
        weights = part.weights if factors is None else part.weights * factors
        values = take(self.v, part.keys, part.block.stop, 2)
        return ungroup_heads(torch.matmul(weights.to(values.dtype), values), self.heads)

    def attention_backward(
        self, part: _Part, grad_out: Tensor, grads: list[Tensor], sinks_grad: Tensor | None
    ) -> Tensor:
        """Adds to the gradients of q, k, v; returns that of the bias (B, Q, S)."""
        grad_q, grad_k, grad_v = grads
        keys, block = part.keys, part.block
        weights, stop, dtype = part.weights, block.stop, self.v.dtype
        grad_out = group_heads(grad_out.to(dtype), self.kv_heads)
        values = take(self.v, keys, stop, 2)
        grad_weights = self.scratch[1].product(grad_out, values.transpose(2, 3))
        factors = self.dropped(part)
        used = weights
        if factors is not None:
            used, grad_weights = weights * factors, grad_weights.mul_(factors)
        give(grad_v, keys, stop, 2, torch.matmul(used.transpose(2, 3).to(dtype), grad_out))

        grad_logits = grad_weights
        torch._softmax_backward_data(
            grad_weights, weights, -1, weights.dtype, grad_input=grad_logits
        )
        bias_grad = ungroup_heads(grad_logits, self.heads).sum(1)
        if sinks_grad is not None:
            # the softmax's gradients sum to 0 over the keys and the sink
            sinks_grad -= ungroup_heads(grad_logits, self.heads).sum((0, 2, 3))
        if part.tanh is not None:
            grad_logits *= 1 - part.tanh.square()
        grad_logits = grad_logits.to(dtype)
        q = group_heads(self.q[:, :, block] * self.form.scaling, self.kv_heads)
        grad_block = torch.matmul(grad_logits, take(self.k, keys, stop, 2))
        grad_q[:, :, block] = ungroup_heads(grad_block, self.heads) * self.form.scaling
        give(grad_k, keys, stop, 2, torch.matmul(grad_logits.transpose(2, 3), q))
        return bias_grad

    def votes_backward(
        self,
        part: _Part,
        bias_grad: Tensor,
        carry_grad: list[Tensor],
        vote_grads: list[tuple[Tensor, ...]],
    ) -> None:
        """Adds to the gradients of q_int, k_int, β of every layer of votes."""
        options, keys, block, stop = self.options, part.keys, part.block, part.block.stop
        if part.time.padded:
            bias_grad = bias_grad * (part.time.clock >= 0)[..., None]
        for layer, (q_int, k_int, _) in enumerate(self.votes):
            grad_q, grad_k, grad_beta = vote_grads[layer]
            old = take(carry_grad[layer], keys, stop, 1)
            grad, new = log_keep_backward(
                bias_grad, part.scores[layer], old, part.time, options.gate, options.backend
            )
            if keys is None:
                carry_grad[layer][:, :stop] = new
            else:
                carry_grad[layer].index_copy_(1, keys, new)
            k_alive = take(k_int[self.rows], keys, stop, 1)
            grad_q[self.rows, block] = torch.bmm(grad, k_alive)
            back = torch.bmm(grad.transpose(1, 2), q_int[self.rows, block])
            give(grad_k[self.rows], keys, stop, 1, back)
            grad_beta += grad.sum()
