"""The decode step's kernels: vote, drop, move, insert, attend, over rows that are dense prefixes.

The arrays are views of tensors (see `cpu.decode`); a stored bfloat16 arrives as its bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from kvprune.ops.decode.scalar import exp, widen
from kvprune.ops.jit import Array, Scalar, njit

# sums may be reordered; NaN and infinities keep their meaning
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

# slots that stay in the first-level cache while the query heads of a group take turns
BLOCK = 32


class New(NamedTuple):
    """What one new token per row brings."""

    query: Array  # (B, Hq, 1, D) float32
    key: Array  # (B, H, 1, D)
    value: Array  # (B, H, 1, Dv)
    query_int: Array  # (B, R) float32; R = 0: no vote
    key_int: Array  # (B, R) float32
    number: Array  # (B,) int64
    active: Array  # (B,) bool
    also_drop: Array  # (B, S) bool; (B, 0) if nothing but votes drops


class Rules(NamedTuple):
    """The numbers of `Votes` and of `AttentionForm`."""

    beta: float
    threshold: float
    protect_first: int
    protect_recent: int
    scaling: float
    softcap: float  # 0: none


class Columns(NamedTuple):
    """The table's columns at full capacity."""

    keys: Array  # (B, H, capacity, D)
    values: Array  # (B, H, capacity, Dv)
    key_int: Array  # (B, capacity, R)
    token: Array  # (B, capacity)
    valid: Array  # (B, capacity)


class Moves(NamedTuple):
    """What the first kernel passes to the second."""

    kept: Array  # (B,), tokens before the new one is inserted
    slots: Array  # (B, capacity + 1, 2): from, to; −1 ends the list


class Result(NamedTuple):
    dropped: Array  # (B, S) int64
    weights: Array  # (B, Hq, S + 1) float32; (B, Hq, 0) if not wanted
    output: Array  # (B, Hq, 1, Dv) float32


@njit(cache=True)
def step(*flat: Any) -> int:
    """Both kernels on the fields of (New, Rules, Columns, Moves, Result); the new width.

    A named tuple as an argument costs Numba three times as much as its fields.
    """
    new, rules = New(*flat[:8]), Rules(*flat[8:14])
    columns, moves, result = Columns(*flat[14:19]), Moves(*flat[19:21]), Result(*flat[21:])
    # arrays to be written come by themselves: in a parallel kernel Numba takes the last write to
    # a field of a tuple for dead code
    vote_and_drop(
        new, rules, columns.key_int, columns.token, columns.valid, moves.kept, moves.slots,
        result.dropped,
    )  # fmt: skip
    insert_and_attend(
        new, rules, columns.keys, columns.values, moves.kept, moves.slots, result.weights,
        result.output,
    )  # fmt: skip
    return (moves.kept + new.active).max() if len(moves.kept) else 0


@njit(parallel=True, cache=True, fastmath=FASTMATH)
def vote_and_drop(
    new: New,
    rules: Rules,
    key_int: Array,
    token: Array,
    valid: Array,
    kept: Array,
    slots: Array,
    dropped: Array,
) -> None:
    """What a row's heads share: the vote, the list of moves, token numbers and interaction keys."""
    query_int, new_int, number = new.query_int, new.key_int, new.number
    active, also_drop = new.active, new.also_drop
    beta, threshold = np.float32(rules.beta), np.float32(rules.threshold)
    protect_first, protect_recent = rules.protect_first, rules.protect_recent
    (B, S), R = dropped.shape, query_int.shape[1]
    for b in prange(B):
        n = 0
        for j in range(S):
            n += valid[b, j]
            dropped[b, j] = -1
        slots[b, 0, 0] = -1
        kept[b] = n
        if not active[b]:
            continue
        for j in range(n):
            out = also_drop.shape[1] > 0 and also_drop[b, j]
            if R and token[b, j] >= protect_first and number[b] - token[b, j] > protect_recent:
                s = np.float32(0)
                for r in range(R):
                    s += query_int[b, r] * key_int[b, j, r]
                out |= s + beta <= threshold
            if out:
                dropped[b, j] = token[b, j]
        # the row's last survivors move into the slots of the dropped
        j = m = 0
        while j < n:
            if dropped[b, j] >= 0:
                n -= 1
                while n > j and dropped[b, n] >= 0:
                    n -= 1
                if n > j:
                    token[b, j] = token[b, n]
                    key_int[b, j] = key_int[b, n]
                    slots[b, m] = n, j
                    m += 1
            j += 1
        slots[b, m, 0] = -1
        valid[b, n:S] = False
        token[b, n], valid[b, n] = number[b], True
        key_int[b, n, :R] = new_int[b]
        kept[b] = n


@njit(parallel=True, cache=True, fastmath=FASTMATH)
def insert_and_attend(
    new: New,
    rules: Rules,
    keys: Array,
    values: Array,
    kept: Array,
    slots: Array,
    p: Array,
    output: Array,
) -> None:
    """Per key head: carry out the moves, store the new token, attend to the row's prefix."""
    new_key, new_value, active = new.key, new.value, new.active
    scaling, softcap = np.float32(rules.scaling), np.float32(rules.softcap)
    (B, H), G = keys.shape[:2], new.query.shape[1] // keys.shape[1]
    # reshaped, not sliced, so that the compiler still knows that the arrays are contiguous
    query = new.query.reshape((B, H, G, new.query.shape[3]))
    output = output.reshape((B, H, G, output.shape[3]))
    p = p.reshape((B, H, G, p.shape[2]))
    # rows change fastest, so that every thread gets long and short ones
    for task in prange(H * B):
        h, b = task // B, task % B
        out = output[b, h]
        if not active[b]:
            for g in range(G):
                for d in range(out.shape[1]):
                    out[g, d] = widen(new_value[b, h, 0, d])
            p[b, h] = 0
            continue
        k, v = keys[b, h], values[b, h]
        m = 0
        while slots[b, m, 0] >= 0:
            source, slot = slots[b, m]
            k[slot] = k[source]
            v[slot] = v[source]
            m += 1
        k[kept[b]], v[kept[b]] = new_key[b, h, 0], new_value[b, h, 0]
        n = kept[b] + 1
        # weights that are not wanted take a few hundred bytes, which stay in the cache
        weights = p[b, h] if p.shape[3] else np.empty((G, n), np.float32)
        attend(query[b, h], k, v, n, scaling, softcap, weights, out)


@njit(cache=True, fastmath=FASTMATH)
def attend(
    query: Array,
    k: Array,
    v: Array,
    n: int,
    scaling: Scalar,
    softcap: Scalar,
    p: Array,
    output: Array,
) -> None:
    """One key head: its G queries take turns on each block of slots while it is in the cache."""
    G = query.shape[0]  # query: (G, D), k: (S, D), v: (S, Dv), p: (G, S), output: (G, Dv)
    block = n if G == 1 else BLOCK
    for start in range(0, n, block):
        for g in range(G):
            stop = min(start + block, n)
            dots(p[g, start:stop], query[g], k[start:stop])
    for g in range(G):
        softmax(p[g, :n], scaling, softcap)
        p[g, n:] = 0
        output[g] = 0
    for start in range(0, n, block):
        for g in range(G):
            stop = min(start + block, n)
            add_values(output[g], p[g, start:stop], v[start:stop])


@njit(cache=True, fastmath=FASTMATH)
def softmax(p: Array, scaling: Scalar, softcap: Scalar) -> None:
    """Dot products become weights, in place."""
    n = len(p)
    for j in range(n):
        p[j] *= scaling
    if softcap > 0:
        for j in range(n):
            p[j] = math.tanh(p[j] / softcap) * softcap
    top = p[0]
    for j in range(1, n):
        top = max(top, p[j])
    total = np.float32(0)
    for j in range(n):
        p[j] = exp(p[j] - top)
        total += p[j]
    share = np.float32(1) / total
    for j in range(n):
        p[j] *= share


@njit(cache=True, fastmath=FASTMATH)
def dots(logit: Array, q: Array, k: Array) -> None:
    """logit[j] = q·k[j], four slots at a time so that each part of `q` is loaded once for four."""
    n, zero = len(k), np.float32(0)
    fours = n // 4 * 4
    for j in range(0, fours, 4):
        s0, s1, s2, s3 = zero, zero, zero, zero
        k0, k1, k2, k3 = k[j], k[j + 1], k[j + 2], k[j + 3]
        for d in range(q.shape[0]):
            s0 += q[d] * widen(k0[d])
            s1 += q[d] * widen(k1[d])
            s2 += q[d] * widen(k2[d])
            s3 += q[d] * widen(k3[d])
        logit[j], logit[j + 1], logit[j + 2], logit[j + 3] = s0, s1, s2, s3
    for j in range(fours, n):
        s = zero
        for d in range(q.shape[0]):
            s += q[d] * widen(k[j, d])
        logit[j] = s


@njit(cache=True, fastmath=FASTMATH)
def add_values(out: Array, p: Array, v: Array) -> None:
    """out += Σ p[j] v[j], eight slots at a time: `out` is loaded and stored once for eight."""
    n = len(v)
    eights = n // 8 * 8
    for j in range(0, eights, 8):
        p0, p1, p2, p3 = p[j], p[j + 1], p[j + 2], p[j + 3]
        p4, p5, p6, p7 = p[j + 4], p[j + 5], p[j + 6], p[j + 7]
        v0, v1, v2, v3 = v[j], v[j + 1], v[j + 2], v[j + 3]
        v4, v5, v6, v7 = v[j + 4], v[j + 5], v[j + 6], v[j + 7]
        for d in range(out.shape[0]):
            near = p0 * widen(v0[d]) + p1 * widen(v1[d]) + p2 * widen(v2[d]) + p3 * widen(v3[d])
            far = p4 * widen(v4[d]) + p5 * widen(v5[d]) + p6 * widen(v6[d]) + p7 * widen(v7[d])
            out[d] += near + far
    for j in range(eights, n):
        for d in range(out.shape[0]):
            out[d] += p[j] * widen(v[j, d])
