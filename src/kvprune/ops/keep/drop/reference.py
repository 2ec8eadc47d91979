"""Drop steps in plain torch, on any device: one block of queries at a time."""

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
    """When each key is dropped, as the index of the query that drops it: (B, P + T).

    drop_step[j] = min{ i > j : s[i, j] ≤ threshold }, NEVER if there is none; a pad's is its own
    index. Key j is visible to query k iff j ≤ k < drop_step[j]: the full hard mask in O(T).
    Each block of queries scores only the keys not yet dropped. The first P keys are those of
    a cache, older than every query.
    """
    T, P = q_int.shape[1], timeline.past
    steps = timeline.index.where(timeline.visible_from == NEVER, NEVER)
    for rows in row_groups(q_int):
        time = timeline.rows(rows)
        for queries in query_blocks(T, block):
            present = (steps[rows, : P + queries.stop] == NEVER).any(0)
            keys = present.nonzero().squeeze(-1)
            k_alive = k_int[rows].index_select(1, keys)
            scores = torch.matmul(q_int[rows, queries], k_alive.transpose(1, 2)) + beta
            votable = time.votable_from.index_select(1, keys)
            drops = (scores <= threshold) & (time.clock[:, queries, None] >= votable[:, None])
            first = drops.int().argmax(dim=-2) + queries.start  # (B, S)
            old = steps[rows].index_select(1, keys)
            first = torch.minimum(old, first.where(drops.any(dim=-2), NEVER))
            steps[rows] = steps[rows].index_copy(1, keys, first)
    return steps
