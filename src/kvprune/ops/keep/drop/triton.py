"""Drop steps by a Triton kernel: O(T) memory, and a block of keys stops when its last one is gone.

One program per row and block of keys walks down the queries from its own block on. Per pair of
blocks: 2·BLOCK²·R FLOPs in float32 and 4·BLOCK·R bytes (q_int; k_int stays): BLOCK/2 = 32 FLOPs per
byte of the second-level cache, and of memory no bytes to speak of. Bound by float32 products; pairs
scored are T²/2 at most, less by the blocks of keys of which none is left.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kvprune.ops.attend.triton_tiles import padded, product, rows_of, tiles_for
from kvprune.ops.gpu import Block, cdiv, jit, on_its_device
from kvprune.ops.never import NEVER
from kvprune.ops.timeline import Timeline

STAYS = tl.constexpr(NEVER)


@jit
def first_drop(
    q_int: Block, k_int: Block, beta: Block, clock: Block, visible_from: Block,
    votable_from: Block, steps: Block, T: Block, S: Block, threshold: Block,
    R: tl.constexpr, PADDED_R: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """steps[j] = min{ i : clock[i] ≥ votable_from[j], q_int[i]·k_int[j] + β ≤ threshold }"""
    j, b = tl.program_id(0), tl.program_id(1)
    key = j * BLOCK + tl.arange(0, BLOCK)
    inside = key < S
    visible = tl.load(visible_from + b * S + key, inside, STAYS)
    votable = tl.load(votable_from + b * S + key, inside, STAYS)
    k = rows_of(k_int + b.to(tl.int64) * S * R, key, S, R, PADDED_R)
    past = S - T
    step = tl.where(visible < STAYS, STAYS, key - past)
    least = tl.load(beta)
    start = tl.maximum(j * BLOCK - past, 0) // BLOCK * BLOCK
    open = tl.max(((step == STAYS) & (votable < STAYS)).to(tl.int32), 0)
    while (start < T) & (open > 0):
        query = start + tl.arange(0, BLOCK)
        now = tl.load(clock + b * T + query, query < T, -1)
        q = rows_of(q_int + b.to(tl.int64) * T * R, query, T, R, PADDED_R)
        scores = product(q, tl.trans(k), PRECISION, WIDEN) + least
        drops = (scores <= threshold) & (now[:, None] >= votable[None, :])
        first = tl.min(tl.where(drops, query[:, None], STAYS), 0)
        # a pad's step is its own number, and nobody votes on it
        step = tl.minimum(step, first)
        open = tl.max(((step == STAYS) & (votable < STAYS)).to(tl.int32), 0)
        start += BLOCK
    tl.store(steps + b.to(tl.int64) * S + key, step, inside)


@on_its_device
def drop_steps(
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor,
    timeline: Timeline,
    threshold: float = 0.0,
    block: int = 256,
) -> Tensor:
    """See reference.drop_steps; a block of keys that are gone is not scored again."""
    (B, T, R), S = q_int.shape, k_int.shape[1]
    steps = torch.empty(B, S, dtype=torch.long, device=q_int.device)
    tiles = tiles_for(q_int)
    time = timeline.clock, timeline.visible_from, timeline.votable_from
    first_drop[(cdiv(S, tiles.block), B)](
        *(x.contiguous() for x in (q_int, k_int, beta, *time)), steps, T, S, float(threshold),
        R=R, PADDED_R=padded(R), **tiles.options(),
    )  # fmt: skip
    return steps
