"""Gradients of queries, keys, values and of log keep: three kernels that compute the weights again.

Nothing is added by two programs at once, so that a gradient is the same in every run. Per tile that
is alive and head, FLOPs and reads from the second-level cache:

    queries          program: row, head, query block       BLOCK²·(4·D + 2·Dv)
    keys, values     program: row, key head, key block     BLOCK²·(4·D + 4·Dv)
    log keep         program: row, tile; heads inside      BLOCK²·(2·D + 2·Dv)

Each reads two operands, BLOCK·(D + Dv)·width bytes, and 4·BLOCK² of log keep; the first two kernels
hold the other two operands, the last reads four and writes 4·BLOCK² once for all heads. In bfloat16
with D = 64, BLOCK = 32 that is 32, 43 and 16 FLOPs per byte of that cache; of memory, from which
each operand is read once, more by the number of blocks.
"""

from __future__ import annotations

import triton.language as tl

from kvprune.ops.attend.triton_tiles import (
    capped,
    product,
    put_rows,
    rows_of,
    stays,
    tile_of,
    turned_tile_of,
)
from kvprune.ops.gpu import Block, jit


@jit
def logits_grad(
    left: Block, right: Block, left_v: Block, right_v: Block, bias: Block, least: Block,
    delta: Block, head: Block, query: Block, key: Block, scaling: Block, cap: Block, share: Block,
    seed: Block, CAP: tl.constexpr, DROPOUT: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> tuple[Block, Block, Block]:  # fmt: skip
    """Of a tile: the weights that met the values, d loss/d logits, and d logits/d (q·k · scaling).

    d logits = weights ∘ (d weights − delta), where delta = Σ weights ∘ d weights = Σ out ∘ d out.
    Given q, k, d out, v it is queries × keys, and given k, q, v, d out it is keys × queries.
    """
    logits = capped(product(left, tl.trans(right), PRECISION, WIDEN) * scaling, cap, CAP)
    weights = tl.exp(logits + bias - least)
    used, grad_weights = weights, product(left_v, tl.trans(right_v), PRECISION, WIDEN)
    if DROPOUT:
        factors = stays(seed, head, query, key, share, BLOCK)
        used, grad_weights = weights * factors, grad_weights * factors
    bend = 1.0
    if CAP:
        bend = 1 - (logits / cap) * (logits / cap)
    return used, weights * (grad_weights - delta), bend


@jit
def queries_backward(
    q_ptr: Block, k_ptr: Block, v_ptr: Block, grad_ptr: Block, lse: Block, deltas: Block,
    bias: Block, alive: Block, grad_q: Block, T: Block, first: Block, query_blocks: Block,
    key_blocks: Block, scaling: Block, cap: Block, share: Block, seed: Block,
    CAP: tl.constexpr, DROPOUT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, PADDED_D: tl.constexpr, V: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """grad_q = d logits @ k · scaling"""
    i, head = query_blocks - 1 - tl.program_id(0), tl.program_id(1)
    b = head // HEADS
    query = (first + i) * BLOCK + tl.arange(0, BLOCK)
    own, shared = head.to(tl.int64) * T, (head // GROUP).to(tl.int64) * T
    q = rows_of(q_ptr + own * D, query, T, D, PADDED_D)
    grad = rows_of(grad_ptr + own * V, query, T, V, PADDED_V)
    least = tl.load(lse + own + query, query < T, float("inf"))
    delta = tl.load(deltas + own + query, query < T, 0.0)
    total = tl.zeros((BLOCK, PADDED_D), tl.float32)
    row = (b * query_blocks + i) * key_blocks
    for j in range(first + i + 1):
        if tl.load(alive + row + j) != 0:
            key = j * BLOCK + tl.arange(0, BLOCK)
            k = rows_of(k_ptr + shared * D, key, T, D, PADDED_D)
            v = rows_of(v_ptr + shared * V, key, T, V, PADDED_V)
            tile = tl.load(bias + turned_tile_of(row + j, BLOCK))
            _, grad_logits, bend = logits_grad(
                q, k, grad, v, tile, least[:, None], delta[:, None], head, query[:, None],
                key[None, :], scaling, cap, share, seed, CAP, DROPOUT, BLOCK, PRECISION, WIDEN,
            )  # fmt: skip
            total += product((grad_logits * bend).to(k.dtype), k, PRECISION, WIDEN)
    put_rows(grad_q + own * D, query, T, total * scaling, D, PADDED_D)


@jit
def keys_backward(
    q_ptr: Block, k_ptr: Block, v_ptr: Block, grad_ptr: Block, lse: Block, deltas: Block,
    bias: Block, alive: Block, grad_k: Block, grad_v: Block, T: Block, first: Block,
    query_blocks: Block, key_blocks: Block, scaling: Block, cap: Block, share: Block, seed: Block,
    CAP: tl.constexpr, DROPOUT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, PADDED_D: tl.constexpr, V: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """grad_k += d logitsᵀ @ q · scaling and grad_v += weightsᵀ @ grad, over the queries' heads."""
    j, kv_head = tl.program_id(0), tl.program_id(1)
    b = kv_head * GROUP // HEADS
    key = j * BLOCK + tl.arange(0, BLOCK)
    shared = kv_head.to(tl.int64) * T
    k = rows_of(k_ptr + shared * D, key, T, D, PADDED_D)
    v = rows_of(v_ptr + shared * V, key, T, V, PADDED_V)
    # what the stripes after this one have added
    total_k = rows_of(grad_k + shared * D, key, T, D, PADDED_D)
    total_v = rows_of(grad_v + shared * V, key, T, V, PADDED_V)
    for i in range(tl.maximum(first, j) - first, query_blocks):
        number = (b * query_blocks + i) * key_blocks + j
        if tl.load(alive + number) != 0:
            query = (first + i) * BLOCK + tl.arange(0, BLOCK)
            tile = tl.load(bias + tile_of(number, BLOCK))
            for g in range(GROUP):
                head = kv_head * GROUP + g
                own = head.to(tl.int64) * T
                q = rows_of(q_ptr + own * D, query, T, D, PADDED_D)
                grad = rows_of(grad_ptr + own * V, query, T, V, PADDED_V)
                least = tl.load(lse + own + query, query < T, float("inf"))
                delta = tl.load(deltas + own + query, query < T, 0.0)
                used, grad_logits, bend = logits_grad(
                    k, q, v, grad, tile, least[None, :], delta[None, :], head, query[None, :],
                    key[:, None], scaling, cap, share, seed, CAP, DROPOUT, BLOCK, PRECISION,
                    WIDEN,
                )  # fmt: skip
                total_v += product(used.to(q.dtype), grad, PRECISION, WIDEN)
                back = (grad_logits * bend * scaling).to(q.dtype)
                total_k += product(back, q, PRECISION, WIDEN)
    put_rows(grad_k + shared * D, key, T, total_k, D, PADDED_D)
    put_rows(grad_v + shared * V, key, T, total_v, V, PADDED_V)


@jit
def log_keep_grad(
    q_ptr: Block, k_ptr: Block, v_ptr: Block, grad_ptr: Block, lse: Block, deltas: Block,
    bias: Block, alive: Block, grad_sum: Block, grad_bias: Block, T: Block, first: Block,
    query_blocks: Block, key_blocks: Block, scaling: Block, cap: Block, share: Block, seed: Block,
    CAP: tl.constexpr, DROPOUT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, PADDED_D: tl.constexpr, V: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """grad_bias = Σ over heads of d logits + grad_sum · keep, the gradient of the sum of keep."""
    i, j = tl.program_id(0) // key_blocks, tl.program_id(0) % key_blocks
    b = tl.program_id(1)
    number = (b * query_blocks + i) * key_blocks + j
    if tl.load(alive + number) != 0:
        place = tile_of(number, BLOCK)
        tile = tl.load(bias + place)
        total = tl.load(grad_sum + b) * tl.exp(tile)
        query = (first + i) * BLOCK + tl.arange(0, BLOCK)
        key = j * BLOCK + tl.arange(0, BLOCK)
        for h in range(HEADS):
            head = b * HEADS + h
            own, shared = head.to(tl.int64) * T, (head // GROUP).to(tl.int64) * T
            q = rows_of(q_ptr + own * D, query, T, D, PADDED_D)
            k = rows_of(k_ptr + shared * D, key, T, D, PADDED_D)
            v = rows_of(v_ptr + shared * V, key, T, V, PADDED_V)
            grad = rows_of(grad_ptr + own * V, query, T, V, PADDED_V)
            least = tl.load(lse + own + query, query < T, float("inf"))
            delta = tl.load(deltas + own + query, query < T, 0.0)
            _, grad_logits, _ = logits_grad(
                k, q, v, grad, tile, least[None, :], delta[None, :], head, query[None, :],
                key[:, None], scaling, cap, share, seed, CAP, DROPOUT, BLOCK, PRECISION, WIDEN,
            )  # fmt: skip
            total += grad_logits
        tl.store(grad_bias + place, total)
