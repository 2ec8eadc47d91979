"""Attention of one head over the tiles of log keep that are alive: nothing of size T × T is made.

One program per row, head and block of queries. FLOPs: 2·BLOCK²·(D + Dv) per tile that is alive.
Bytes per tile: keys and values BLOCK·(D + Dv)·width, and log keep 4·BLOCK², which all heads share
and the second-level cache holds. In bfloat16 with D = 64 and BLOCK = 32 that is 21 FLOPs per byte
of the cache. Of memory, from which mostly log keep is read, it is
2·BLOCK²·(D + Dv)·Hq / 4·BLOCK² = 64·Hq.
"""

from __future__ import annotations

import triton.language as tl

from kvprune.ops.attend.triton_tiles import (
    capped,
    product,
    put_rows,
    rows_of,
    stays,
    turned_tile_of,
)
from kvprune.ops.gpu import Block, jit


@jit
def attend(
    q_ptr: Block, k_ptr: Block, v_ptr: Block, sinks: Block, bias: Block, alive: Block, out: Block,
    lse: Block, T: Block, first: Block, query_blocks: Block, key_blocks: Block, scaling: Block,
    cap: Block, share: Block, seed: Block,
    CAP: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PADDED_D: tl.constexpr,
    V: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """out = softmax(q·k · scaling + bias) v, and lse, the log of what the softmax divides by."""
    # the last blocks have most keys: they begin first
    i, head = query_blocks - 1 - tl.program_id(0), tl.program_id(1)
    b, h = head // HEADS, head % HEADS
    query = (first + i) * BLOCK + tl.arange(0, BLOCK)
    own, shared = head.to(tl.int64) * T, (head // GROUP).to(tl.int64) * T
    q = rows_of(q_ptr + own * D, query, T, D, PADDED_D)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if SINKS:
        most = tl.zeros((BLOCK,), tl.float32) + tl.load(sinks + h).to(tl.float32)
        total += 1
    sum_v = tl.zeros((BLOCK, PADDED_V), tl.float32)
    row = (b * query_blocks + i) * key_blocks
    for j in range(first + i + 1):
        if tl.load(alive + row + j) != 0:
            key = j * BLOCK + tl.arange(0, BLOCK)
            k = rows_of(k_ptr + shared * D, key, T, D, PADDED_D)
            logits = capped(product(q, tl.trans(k), PRECISION, WIDEN) * scaling, cap, CAP)
            logits += tl.load(bias + turned_tile_of(row + j, BLOCK))
            above = tl.maximum(most, tl.max(logits, 1))
            # a query that has seen nothing yet: −∞ minus −∞ is NaN
            pivot = tl.where(above == float("-inf"), 0.0, above)
            weights = tl.exp(logits - pivot[:, None])
            fade = tl.exp(most - pivot)
            total = total * fade + tl.sum(weights, 1)
            if DROPOUT:
                weights *= stays(seed, head, query[:, None], key[None, :], share, BLOCK)
            v = rows_of(v_ptr + shared * V, key, T, V, PADDED_V)
            sum_v = sum_v * fade[:, None] + product(weights.to(v.dtype), v, PRECISION, WIDEN)
            most = above
    # a pad has seen nothing
    sees = total > 0
    sees = sees | (total != total)
    put_rows(out + own * V, query, T, sum_v / tl.where(sees, total, 1.0)[:, None], V, PADDED_V)
    least = tl.where(sees, most + tl.log(tl.where(sees, total, 1.0)), float("inf"))
    tl.store(lse + own + query, least, query < T)
