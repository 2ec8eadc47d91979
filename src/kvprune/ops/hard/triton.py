"""Hard attention by Triton kernels: a block of queries visits the keys alive for it, and no others.

`list_alive` writes, for each row and block of queries, the numbers of those keys in order; `attend`
gathers them. Survivors lie scattered, so nearly every block of keys has one: a mask of blocks, as
in FlexAttention, would skip little where this skips all that is gone. Memory: 4·B·S·T/BLOCK bytes
for the lists, a stripe of queries at a time so that it is 64 MB at most. FLOPs: 2·(D + Dv) per
query head and pair of a query and a key alive for its block. Bytes per BLOCK keys:
BLOCK·(D + Dv)·width + 12·BLOCK, so in bfloat16 about BLOCK FLOPs per byte of the second-level
cache, as dense flash attention.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from kvprune.ops.attend.triton_tiles import (
    WORKSPACE,
    capped,
    padded,
    product,
    put_rows,
    rows_of,
    tiles_for,
)
from kvprune.ops.form import AttentionForm
from kvprune.ops.gpu import FUSION, Block, cdiv, jit, on_its_device

# keys that are looked at together when lists are written
CHUNK = 512


@jit
def list_alive(
    steps: Block, lists: Block, counts: Block, first: Block, T: Block, S: Block,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """The keys that some query of a block may see, in order, and how many they are."""
    i, b = tl.program_id(0), tl.program_id(1)
    start, past = (first + i) * BLOCK, S - T
    place = (b * tl.num_programs(0) + i).to(tl.int64)
    count = 0
    for chunk in range(0, tl.minimum(past + start + BLOCK, S), CHUNK):
        key = chunk + tl.arange(0, CHUNK)
        inside = key < tl.minimum(past + start + BLOCK, S)
        step = tl.load(steps + b.to(tl.int64) * S + key, inside, 0)
        # what the first query dropped, none of the block sees; its own keys are new
        alive = inside & ((step > start) | (key - past >= start))
        before = tl.cumsum(alive.to(tl.int32), 0)
        tl.store(lists + place * S + count + before - 1, key, alive)
        count += tl.sum(alive.to(tl.int32), 0)
    tl.store(counts + place, count)


@jit
def attend(
    q_ptr: Block, k_ptr: Block, v_ptr: Block, steps: Block, lists: Block, counts: Block,
    sinks: Block, out: Block, first: Block, T: Block, S: Block, scaling: Block, cap: Block,
    CAP: tl.constexpr, SINKS: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, PADDED_D: tl.constexpr, V: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """out = softmax(q·k · scaling) v over the keys j with j ≤ k < step[j]."""
    i, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, h = head // HEADS, head % HEADS
    query = (first + i) * BLOCK + tl.arange(0, BLOCK)
    own, shared = head.to(tl.int64) * T, (head // GROUP).to(tl.int64) * S
    q = rows_of(q_ptr + own * D, query, T, D, PADDED_D)
    most = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    if SINKS:
        most = tl.zeros((BLOCK,), tl.float32) + tl.load(sinks + h).to(tl.float32)
        total += 1
    sum_v = tl.zeros((BLOCK, PADDED_V), tl.float32)
    past = S - T
    row = (b * tl.num_programs(0) + i).to(tl.int64)
    count = tl.load(counts + row)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        # beyond the list, a key that is nowhere
        key = tl.load(lists + row * S + at, at < count, S)
        step = tl.load(steps + b.to(tl.int64) * S + key, at < count, 0)
        index = key - past
        sees = (index[None, :] <= query[:, None]) & (query[:, None] < step[None, :])
        # a pad sees itself: a softmax over nothing is not a number
        sees = sees | (index[None, :] == query[:, None])
        k = rows_of(k_ptr + shared * D, key, S, D, PADDED_D)
        logits = capped(product(q, tl.trans(k), PRECISION, WIDEN) * scaling, cap, CAP)
        logits = tl.where(sees, logits, float("-inf"))
        above = tl.maximum(most, tl.max(logits, 1))
        pivot = tl.where(above == float("-inf"), 0.0, above)
        weights = tl.exp(logits - pivot[:, None])
        fade = tl.exp(most - pivot)
        total = total * fade + tl.sum(weights, 1)
        v = rows_of(v_ptr + shared * V, key, S, V, PADDED_V)
        sum_v = sum_v * fade[:, None] + product(weights.to(v.dtype), v, PRECISION, WIDEN)
        most = above
    # queries beyond the last saw nothing
    mean = sum_v / tl.where(total == 0, 1.0, total)[:, None]
    put_rows(out + own * V, query, T, mean, V, PADDED_V)


@on_its_device
def hard_attention(
    q: Tensor, k: Tensor, v: Tensor, drop_step: Tensor, form: AttentionForm
) -> Tensor:
    """See reference.hard_attention; without gradients and dropout."""
    (B, heads, T, D), (_, kv_heads, S, V) = q.shape, v.shape
    tiles, steps = tiles_for(q, v), drop_step.contiguous()
    blocks = cdiv(T, tiles.block)
    size = min(max(1, WORKSPACE // (B * S)), blocks)
    lists = torch.empty(B * size * S, dtype=torch.int32, device=q.device)
    counts = torch.empty(B * size, dtype=torch.int32, device=q.device)
    out = torch.empty(B, heads, T, V, dtype=q.dtype, device=q.device)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    sinks = q if form.sinks is None else form.sinks.contiguous()
    for first in range(0, blocks, size):
        here = min(size, blocks - first)
        list_alive[(here, B)](
            steps, lists, counts, first, T, S, BLOCK=tiles.block, CHUNK=CHUNK, **FUSION
        )
        attend[(here, B * heads)](
            q, k, v, steps, lists, counts, sinks, out, first, T, S, form.scaling,
            form.softcap or 1.0, CAP=form.softcap is not None, SINKS=form.sinks is not None,
            HEADS=heads, GROUP=heads // kv_heads, D=D, PADDED_D=padded(D), V=V,
            PADDED_V=padded(V), **tiles.options(),
        )  # fmt: skip
    return out
