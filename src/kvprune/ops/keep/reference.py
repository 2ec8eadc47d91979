"""The keep product, one block of queries at a time, in plain torch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.gate import Gate
from kvprune.ops.timeline import Timeline


def log_keep(scores: Tensor, carry: Tensor, time: Timeline, gate: Gate) -> tuple[Tensor, Tensor]:
    """How much of each key is left for each query of a block, and after the block.

    Paper, Eq. (sparisy), in logs:  log keep[k, j] = carry[j] + Σ_{i ≤ k, i in block} log gate[i, j]
    where carry[j] is the sum over the queries before the block. A sum of logs, because 200 gates
    of 0.5 multiply to 0 in float32 and a faint token would look dropped. `time` is that of the
    block's queries and of the keys.
    """
    now = time.clock[..., None]  # (B, Q, 1); scores: (B, Q, S), carry: (B, S)
    votes = gate.log(scores).where(now >= time.votable_from[:, None], 0.0)
    running = carry[:, None] + votes.cumsum(dim=-2)
    after = running[:, -1]
    seen = running.where(now >= time.visible_from[:, None], -torch.inf)
    # a softmax over nothing is NaN: a pad sees every key, and its output is not used
    return seen.where(now >= 0, 0.0), after


def log_keep_backward(
    grad: Tensor, scores: Tensor, carry_grad: Tensor, time: Timeline, gate: Gate
) -> tuple[Tensor, Tensor]:
    """Gradients of the scores and of the carry before the block.

    A vote affects its own query and every later one: d/d log gate[i, j] is the sum of
    grad[k, j] over k ≥ i, with carry_grad[j] from the blocks that follow. `grad` is 0 wherever
    log keep is -∞.
    """
    later = grad.flip(-2).cumsum(dim=-2).flip(-2) + carry_grad[:, None]
    votes = time.clock[..., None] >= time.votable_from[:, None]
    return (later * gate.log_slope(scores)).where(votes, 0.0), later[:, 0]
