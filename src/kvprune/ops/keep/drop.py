"""Hard pruning is one integer a token: the step at which it was dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.attend.blocks import query_blocks, row_groups
from kvprune.ops.timeline import NEVER, Timeline


def drop_steps(
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor,
    timeline: Timeline,
    threshold: float = 0.0,
    block: int = 256,
) -> Tensor:
    """When each token is dropped, as the index of the token that drops it: (B, T).

    drop_step[j] = min{ i > j : s[i, j] ≤ threshold }, NEVER if there is none; a pad's is its own
    index. Token j is visible to query k iff j ≤ k < drop_step[j]: the whole hard mask in O(T).
    Each block of queries scores only the tokens that are still there.
    """
    B, T, _ = q_int.shape
    steps = torch.full((B, T), NEVER, device=q_int.device)
    if timeline.padded:
        pads = torch.arange(T, device=q_int.device).expand(B, T)
        steps = pads.where(timeline.clock < 0, steps)
    for rows in row_groups(q_int):
        time = timeline.rows(rows)
        for queries in query_blocks(T, block):
            present = (steps[rows, : queries.stop] == NEVER).any(0)
            keys = present.nonzero().squeeze(-1)
            scores = torch.matmul(
                q_int[rows, queries], k_int[rows].index_select(1, keys).transpose(1, 2)
            )
            votable = time.votable_from.index_select(1, keys)
            drops = (scores + beta <= threshold) & (
                time.clock[:, queries, None] >= votable[:, None]
            )
            first = drops.int().argmax(dim=-2) + queries.start  # (B, S)
            old = steps[rows].index_select(1, keys)
            first = torch.minimum(old, first.where(drops.any(dim=-2), NEVER))
            steps[rows] = steps[rows].index_copy(1, keys, first)
    return steps


def kept_pairs(drop_step: Tensor, timeline: Timeline) -> Tensor:
    """How many pairs j < k of real tokens in which k still sees j: (B,)."""
    T = drop_step.shape[-1]
    real = timeline.clock >= 0
    seen = real.cumsum(-1)
    # real tokens before the one that drops j; a pad at the row's start has none before it
    last = seen.gather(-1, (drop_step.clamp(max=T) - 1).clamp(min=0))
    return (last - seen).where(real, 0).sum(-1)
