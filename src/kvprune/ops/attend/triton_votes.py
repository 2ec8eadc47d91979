"""Gradients of the votes, from those of log keep.

A vote affects its own query and every later one, so one program per row and block of keys walks up
the stripe with the sum of the gradients below: 4·BLOCK²·R FLOPs per tile that is alive, one slope
of the gate per pair, and 8·BLOCK² + 4·BLOCK·R bytes of memory. `queries_int_backward` multiplies
the tiles by k_int: 2·BLOCK²·R FLOPs and 4·BLOCK² bytes. With R = 64, BLOCK = 32 that is 16 and 32
FLOPs per byte, near where float32 products stop being bound by memory. It costs as much as one
head.
"""

from __future__ import annotations

import triton.language as tl

from kvprune.ops.alpha_sigmoid.triton import slope
from kvprune.ops.attend.triton_keep import UNSEEN
from kvprune.ops.attend.triton_tiles import product, put_rows, rows_of, tile_of, turned_tile_of
from kvprune.ops.gpu import Block, jit


@jit
def votes_backward(
    q_int: Block, k_int: Block, beta: Block, clock: Block, votable_from: Block, grad_bias: Block,
    alive: Block, grad_carry: Block, grad_scores: Block, grad_k: Block, grad_beta: Block,
    gate: Block, T: Block, first: Block, query_blocks: Block, key_blocks: Block,
    KIND: tl.constexpr, R: tl.constexpr, PADDED_R: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """grad_scores[i, j] = gate'/gate · Σ_{k ≥ i} grad_bias[k, j], and of k_int and β their sums.

    grad_carry goes from stripe to stripe. Where a tile is not alive no later one is, so that there
    is no gradient.
    """
    j, b = tl.program_id(0), tl.program_id(1)
    key = j * BLOCK + tl.arange(0, BLOCK)
    inside = key < T
    votable = tl.load(votable_from + b * T + key, inside, UNSEEN)
    later = tl.load(grad_carry + b * T + key, inside, 0.0)
    at = b.to(tl.int64) * T
    k = rows_of(k_int + at * R, key, T, R, PADDED_R)
    total_k = rows_of(grad_k + at * R, key, T, R, PADDED_R)
    b0, total = tl.load(beta), 0.0
    i = query_blocks - 1
    while i >= tl.maximum(first, j) - first:
        number = (b * query_blocks + i) * key_blocks + j
        if tl.load(alive + number) != 0:
            query = (first + i) * BLOCK + tl.arange(0, BLOCK)
            now = tl.load(clock + b * T + query, query < T, -1)
            q = rows_of(q_int + at * R, query, T, R, PADDED_R)
            scores = product(k, tl.trans(q), PRECISION, WIDEN) + b0
            place = tile_of(number, BLOCK)
            grad = tl.load(grad_bias + place)
            back = tl.cumsum(grad, 1, reverse=True) + later[:, None]
            later += tl.sum(grad, 1)
            votes = now[None, :] >= votable[:, None]
            back = tl.where(votes, back * slope(scores, gate, KIND, True), 0.0)
            tl.store(grad_scores + place, back)
            total_k += product(back, q, PRECISION, WIDEN)
            total += tl.sum(back)
        i -= 1
    tl.store(grad_carry + b * T + key, later, inside)
    put_rows(grad_k + at * R, key, T, total_k, R, PADDED_R)
    sum_at = grad_beta + b * key_blocks + j
    tl.store(sum_at, tl.load(sum_at) + total)


@jit
def queries_int_backward(
    k_int: Block, alive: Block, grad_scores: Block, grad_q: Block, T: Block, first: Block,
    query_blocks: Block, key_blocks: Block, R: tl.constexpr, PADDED_R: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """grad_q = grad_scores @ k_int"""
    i, b = query_blocks - 1 - tl.program_id(0), tl.program_id(1)
    query = (first + i) * BLOCK + tl.arange(0, BLOCK)
    at = b.to(tl.int64) * T
    total = tl.zeros((BLOCK, PADDED_R), tl.float32)
    for j in range(first + i + 1):
        number = (b * query_blocks + i) * key_blocks + j
        if tl.load(alive + number) != 0:
            key = j * BLOCK + tl.arange(0, BLOCK)
            k = rows_of(k_int + at * R, key, T, R, PADDED_R)
            tile = tl.load(grad_scores + turned_tile_of(number, BLOCK))
            total += product(tile, k, PRECISION, WIDEN)
    put_rows(grad_q + at * R, query, T, total, R, PADDED_R)
