"""Hard attention in bfloat16 on CPUs: one task per row, key head and block of queries.

A task gathers the keys and values that are alive for its block, in the order that the products
want, and then takes the queries six at a time: scores, softmax, values. Nothing leaves the
second-level cache between those, and no mask is made.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import get_thread_id, prange  # type: ignore[attr-defined]
from torch import Tensor

from kvprune.ops.decode.scalar import at, exp, narrow
from kvprune.ops.form import AttentionForm
from kvprune.ops.hard.tile import COLUMNS, ROWS, multiply
from kvprune.ops.jit import Array, Scalar, njit
from kvprune.ops.threads import use_threads

# queries of a task, a multiple of ROWS: more, and keys that only its first queries see are scored
# for all; fewer, and keys are gathered for too few
BLOCK = 96
# the score of a key that is not seen; an infinity would forbid reordering
UNSEEN = np.float32(-1e30)
# under this e^x is too small for a sum that has a 1 in it
FAINT = np.float32(-80.0)

PAIRS, HALVES = np.empty(0, np.uint32), np.empty(0, np.uint16)


def hard_attention(
    q: Tensor, k: Tensor, v: Tensor, drop_step: Tensor, form: AttentionForm
) -> Tensor:
    """See reference.hard_attention; plain attention in bfloat16, without gradients."""
    (B, heads, T, D), (_, kv_heads, S, width) = q.shape, v.shape
    q, k = (x if _in_pairs(x) else x.contiguous() for x in (q, k))
    v = v if v.stride(-1) == 1 else v.contiguous()
    step = drop_step.to(torch.int32).contiguous()
    # in the order in which the host wants it next
    out = torch.empty(B, T, heads, width, dtype=q.dtype)
    use_threads()
    threads, rounded = torch.get_num_threads(), _up(S, COLUMNS)
    keys = np.empty((threads, rounded // COLUMNS * (D // 2), COLUMNS), np.uint32)
    values = np.empty(
        (threads, _up(width, COLUMNS) // COLUMNS * (rounded // 2), COLUMNS), np.uint32
    )
    # one array, because Numba takes no tuples into a parallel loop
    about = np.array([
        *(x.data_ptr() for x in (q, k, v, out)), B, heads, T, D, kv_heads, S, width,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
    ])  # fmt: skip
    _attend(about, step.numpy(), np.float32(form.scaling), keys, values)
    return out.transpose(1, 2)


def _in_pairs(x: Tensor) -> bool:
    """Whether two neighbours of a vector can be read as one number of 32 bits."""
    return x.stride(-1) == 1 and all(s % 2 == 0 for s in x.stride()[:-1])


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@njit(parallel=True, cache=True, fastmath=True)
def _attend(
    about: Array,
    step: Array,
    scaling: Scalar,
    keys: Array,
    values: Array,
) -> None:
    B, T, kv_heads = about[4], about[6], about[8]
    blocks = (T + BLOCK - 1) // BLOCK
    tasks = B * kv_heads * blocks
    for task in prange(tasks):
        # early blocks have fewer keys than late ones, and a thread takes neighbours
        folded = task // 2 if task % 2 == 0 else tasks - 1 - task // 2
        block, row = folded // (B * kv_heads), folded % (B * kv_heads)
        me = get_thread_id()
        _block(
            about, step[row // kv_heads], scaling, keys[me], values[me], row // kv_heads,
            row % kv_heads, block * BLOCK,
        )  # fmt: skip


@njit(cache=True, fastmath=True)
def _block(
    about: Array,
    step: Array,
    scaling: Scalar,
    keys: Array,
    values: Array,
    b: int,
    h: int,
    start: int,
) -> None:
    """The queries from `start` on of the heads that share key head h."""
    heads, T, D, kv_heads, S, width = about[5], about[6], about[7], about[8], about[9], about[10]
    q_stride, k_stride, v_stride = about[11:14], about[14:17], about[17:20]
    group, past, stop = heads // kv_heads, S - T, min(start + BLOCK, T)
    index, until = np.empty(S, np.int32), np.empty(S, np.int32)
    alive = 0
    for j in range(past + stop):
        # what the block's first query dropped, none of it sees
        if step[j] > start or j - past >= start:
            index[alive], until[alive] = j - past, step[j]
            alive += 1
    k_base = about[1] + 2 * (b * k_stride[0] + h * k_stride[1])
    v_base = about[2] + 2 * (b * v_stride[0] + h * v_stride[1])
    _gather_keys(k_base, k_stride[2], D // 2, index, past, alive, keys)
    _gather_values(v_base, v_stride[2], width, index, past, alive, values)
    rounded = (alive + COLUMNS - 1) // COLUMNS * COLUMNS
    score = np.empty((ROWS, rounded), np.float32)
    weight = np.zeros((ROWS, rounded), np.uint16)
    weights = weight.view(np.uint32)
    panels = (width + COLUMNS - 1) // COLUMNS
    output = np.empty((ROWS, panels * COLUMNS), np.float32)
    query, total = np.zeros((ROWS, D // 2), np.uint32), np.empty(ROWS, np.float32)
    for g in range(group):
        head = h * group + g
        q_base = about[0] + 2 * (b * q_stride[0] + head * q_stride[1])
        seen = 0
        for first in range(start, stop, ROWS):
            rows = min(ROWS, stop - first)
            # keys are in order: those after the last of these queries come at the end
            while seen < alive and index[seen] < first + rows:
                seen += 1
            for r in range(rows):
                query[r] = at(q_base + 2 * (first + r) * q_stride[2], (D // 2,), PAIRS)
            for panel in range((seen + COLUMNS - 1) // COLUMNS):
                multiply(score, panel * COLUMNS, query, keys, panel * (D // 2), D // 2)
            for r in range(rows):
                total[r] = _softmax(score[r], weight[r], index, until, first + r, seen, scaling)
            pairs = (seen + 1) // 2
            for panel in range(panels):
                multiply(
                    output, panel * COLUMNS, weights, values, panel * (values.shape[0] // panels),
                    pairs,
                )  # fmt: skip
            for r in range(rows):
                place = ((b * T + first + r) * heads + head) * width
                out = at(about[3] + 2 * place, (width,), HALVES)
                share = np.float32(1) / total[r]
                for d in range(width):
                    out[d] = narrow(output[r, d] * share, HALVES)


@njit(cache=True, fastmath=True)
def _softmax(
    score: Array,
    weight: Array,
    index: Array,
    until: Array,
    now: int,
    seen: int,
    scaling: Scalar,
) -> Scalar:
    """Weights of one query that do not add up to 1 yet, and what they add up to."""
    now = np.int32(now)
    most = UNSEEN
    for s in range(seen):
        # a pad sees itself: a softmax over nothing is not a number
        sees = ((index[s] <= now) & (now < until[s])) | (index[s] == now)
        x = score[s] * scaling if sees else UNSEEN
        score[s] = x
        most = max(most, x)
    total = np.float32(0)
    for s in range(seen):
        x = score[s] - most
        e = exp(x) if x > FAINT else np.float32(0)
        total += e
        weight[s] = narrow(e, HALVES)
    if seen % 2:
        weight[seen] = 0
    return total


@njit(cache=True)
def _gather_keys(
    base: int, stride: int, pairs: int, index: Array, past: int, alive: int, keys: Array
) -> None:
    """keys[panel · pairs + i, s]: the i-th pair of key 64 · panel + s; zeros after the last."""
    rounded = (alive + COLUMNS - 1) // COLUMNS * COLUMNS
    for s in range(rounded):
        first, column = s // COLUMNS * pairs, s % COLUMNS
        if s < alive:
            key = at(base + 2 * (index[s] + past) * stride, (pairs,), PAIRS)
            for i in range(pairs):
                keys[first + i, column] = key[i]
        else:
            for i in range(pairs):
                keys[first + i, column] = 0


@njit(cache=True)
def _gather_values(
    base: int, stride: int, width: int, index: Array, past: int, alive: int, values: Array
) -> None:
    """values[panel · length + s, d]: number 64 · panel + d of the values 2 s and 2 s + 1."""
    panels = (width + COLUMNS - 1) // COLUMNS
    length = values.shape[0] // panels
    for s in range((alive + 1) // 2):
        # an odd one out stands beside itself, with no weight
        other = min(2 * s + 1, alive - 1)
        low = at(base + 2 * (index[2 * s] + past) * stride, (width,), HALVES)
        high = at(base + 2 * (index[other] + past) * stride, (width,), HALVES)
        for panel in range(panels):
            place, d = values[panel * length + s], panel * COLUMNS
            count = min(COLUMNS, width - d)
            for i in range(count):
                place[i] = np.uint32(low[d + i]) | (np.uint32(high[d + i]) << np.uint32(16))
            for i in range(count, COLUMNS):
                place[i] = 0
