"""Hard attention: each block of queries attends only to the keys still alive for it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprune.ops.attend.blocks import (
    alive_keys,
    at_least_float32,
    group_heads,
    query_blocks,
    row_groups,
    softmax_with_sinks,
    take,
    ungroup_heads,
)
from kvprune.ops.form import AttentionForm


def hard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    drop_step: Tensor,
    form: AttentionForm,
    block: int = 256,
) -> Tensor:
    """Attention in which query k sees key j iff j ≤ k < drop_step[j].

    The more was dropped, the cheaper; nothing of size T × T. Differentiable in q, k and v. Of the
    P + T keys the first P come from a cache: older than every query, so their j is negative.
    q: (B, Hq, T, D), k, v: (B, Hkv, P + T, D), drop_step: (B, P + T) → (B, Hq, T, D)
    """
    T, P, kv_heads = q.shape[2], k.shape[2] - q.shape[2], k.shape[1]
    plain = form.softcap is None and form.sinks is None
    if plain and P == 0 and bool((drop_step >= T).all()):
        return _sdpa(q, k, v, None, form, is_causal=T > 1, gqa=q.shape[1] != kv_heads)
    index = torch.arange(-P, T, device=q.device)
    groups = []
    for rows in row_groups(q):
        outs = []
        for queries in query_blocks(T, block):
            stop = P + queries.stop
            step = drop_step[rows, :stop]
            # a token dropped by the block's first query is invisible to all of the block
            keys = alive_keys((step > queries.start) | (index[:stop] >= queries.start))
            step, j = take(step, keys, stop, 1), take(index, keys, stop, 0)
            now = index[P + queries.start : stop, None]
            # a pad's own column: a softmax over nothing is NaN
            mask = (j <= now) & (now < step[:, None]) | (j == now)  # (B, Q, S)
            q_block = group_heads(q[rows, :, queries], kv_heads)
            mask = mask[:, None].repeat(1, 1, q.shape[1] // kv_heads, 1)  # (B, 1, G·Q, S)
            k_alive, v_alive = take(k[rows], keys, stop, 2), take(v[rows], keys, stop, 2)
            attend = _sdpa if plain else _eager
            out = attend(q_block, k_alive, v_alive, mask, form)
            outs.append(ungroup_heads(out, q.shape[1]))
        groups.append(torch.cat(outs, dim=2))
    return torch.cat(groups)


def _sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    form: AttentionForm,
    is_causal: bool = False,
    gqa: bool = False,
) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, mask, form.dropout, is_causal, scale=form.scaling, enable_gqa=gqa
    )


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    logits = at_least_float32(torch.matmul(q * form.scaling, k.transpose(2, 3)))
    if form.softcap is not None:
        logits = (logits / form.softcap).tanh() * form.softcap
    weights = softmax_with_sinks(logits.where(mask, -torch.inf), form.sinks).to(v.dtype)
    return torch.matmul(F.dropout(weights, form.dropout), v)
