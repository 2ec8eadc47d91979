"""Log keep of a stripe of queries, as tiles, and what it leaves for the stripe after.

One program per row and block of keys walks down the stripe with the running sum of its keys, and
stops when all of them are gone: Σ over the tiles alive of 2·BLOCK²·R FLOPs in float32 and one gate
per pair. Bytes per tile: 4·BLOCK² written, 4·BLOCK·R read (q_int; k_int stays). With R = 64 and
BLOCK = 32 that is 11 FLOPs per byte, bound by memory until the tile is read again by each head from
the second-level cache.
"""

from __future__ import annotations

import triton.language as tl

from kvprune.ops.alpha_sigmoid.triton import value
from kvprune.ops.attend.triton_tiles import product, rows_of, tile_of
from kvprune.ops.gpu import Block, jit
from kvprune.ops.never import NEVER

UNSEEN = tl.constexpr(NEVER)


@jit
def log_keep(
    q_int: Block, k_int: Block, beta: Block, clock: Block, visible_from: Block,
    votable_from: Block, carry: Block, after: Block, bias: Block, alive: Block, sums: Block,
    gate: Block, T: Block, first: Block, query_blocks: Block, key_blocks: Block,
    ADD: tl.constexpr, KIND: tl.constexpr, R: tl.constexpr, PADDED_R: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """`first` is the number of the stripe's first block. With ADD the tiles hold layers below.

    bias[k, j] = carry[j] + Σ_{i ≤ k, i in stripe} log gate[i, j], −∞ where k does not see j.
    """
    j, b = tl.program_id(0), tl.program_id(1)
    key = j * BLOCK + tl.arange(0, BLOCK)
    inside = key < T
    visible = tl.load(visible_from + b * T + key, inside, UNSEEN)
    votable = tl.load(votable_from + b * T + key, inside, UNSEEN)
    running = tl.load(carry + b * T + key, inside, float("-inf"))
    # a pad is as good as dropped
    running = tl.where(visible < UNSEEN, running, float("-inf"))
    at = b.to(tl.int64) * T
    k = rows_of(k_int + at * R, key, T, R, PADDED_R)
    b0 = tl.load(beta)
    i = tl.maximum(first, j)
    total = 0.0
    # not `> −∞`: of a NaN there is something to tell
    while (i < first + query_blocks) & (tl.max((running != float("-inf")).to(tl.int32), 0) > 0):
        query = i * BLOCK + tl.arange(0, BLOCK)
        now = tl.load(clock + b * T + query, query < T, -1)
        q = rows_of(q_int + at * R, query, T, R, PADDED_R)
        scores = product(k, tl.trans(q), PRECISION, WIDEN) + b0
        votes = now[None, :] >= votable[:, None]
        logs = tl.where(votes, value(scores, gate, KIND, True), 0.0)
        seen = running[:, None] + tl.cumsum(logs, 1)
        running += tl.sum(logs, 1)
        seen = tl.where(now[None, :] >= visible[:, None], seen, float("-inf"))
        number = (b * query_blocks + i - first) * key_blocks + j
        tile = bias + tile_of(number, BLOCK)
        living = True
        if ADD:
            living = tl.load(alive + number) != 0
            if living:
                seen += tl.load(tile)
        if living:
            tl.store(tile, seen)
            tl.store(alive + number, tl.max((seen != float("-inf")).to(tl.int32)))
            # every real query sees itself with keep 1, which is no pair
            total += tl.sum(tl.where(query[None, :] > key[:, None], tl.exp(seen), 0.0))
        i += 1
    tl.store(after + b * T + key, running, inside)
    tl.store(sums + b * key_blocks + j, total)
