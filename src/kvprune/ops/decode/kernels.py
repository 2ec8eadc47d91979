"""The decode step's kernels: vote, drop, move, insert, attend, over rows that are dense prefixes.

Every row lies where `Places.where` says, alone or as part of a larger tensor. What a table stores
arrives as NumPy knows it (see `scalar.BITS`), and an array of that dtype, however short, tells a
kernel how to read it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import prange

from kvprune.ops.decode.scalar import at, exp, widen
from kvprune.ops.decode.table import PLACES
from kvprune.ops.decode.tiles import LANES, dot_tile, prefetch, value_tile
from kvprune.ops.jit import FASTMATH, Array, Scalar, njit

# slots that stay in the first-level cache while the query heads of a group take turns
BLOCK = 32

(
    KEYS, VALUES, KEY_SCALE, VALUE_SCALE, KEY_INT, KEY_INT_SCALE, EXTRA, TOKEN, CAPACITY,
) = range(len(PLACES))  # fmt: skip


class New(NamedTuple):
    """What one new token per row brings; scales have no numbers unless int8 is stored."""

    query: Array  # (B, Hq, 1, D) float32
    key: Array  # (B, H, 1, D), as stored
    value: Array  # (B, H, 1, Dv), as stored
    key_scale: Array  # (B, H or 0), float16's bits
    value_scale: Array  # (B, H or 0)
    query_int: Array  # (B, R) float32; R = 0: no vote
    key_int: Array  # (B, R), as stored
    key_int_scale: Array  # (B, 1 or 0), float16's bits
    extra: Array  # (B, E) float32
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


class Rows(NamedTuple):
    """The arrays of `Places`, and what the first kernel passes to the second."""

    where: Array  # (B, 9)
    kept: Array  # (B,)
    moves: Array  # (B, S + 2, 2) int32, slots: from, to; −1 ends the list


class Result(NamedTuple):
    dropped: Array  # (B, S) int64
    weights: Array  # (B, Hq, S + 1) float32; (B, Hq, 0) if not wanted
    output: Array  # (B, Hq, 1, Dv) float32


@njit(cache=True)
def step(threads: int, *flat: Any) -> None:
    """Both kernels on the fields of (New, Rules, Rows, Result).

    A named tuple as an argument costs Numba three times as much as its fields.
    """
    new, rules = New(*flat[:12]), Rules(*flat[12:18])
    rows, result = Rows(*flat[18:21]), Result(*flat[21:])
    # arrays to be written come by themselves: in a parallel kernel Numba takes the last write to
    # a field of a tuple for dead code
    vote_and_drop(new, rules, rows.where, rows.kept, rows.moves, result.dropped)
    insert_and_attend(
        threads, new, rules, rows.where, rows.kept, rows.moves, result.weights, result.output
    )
    for b in range(len(rows.kept)):
        rows.kept[b] += new.active[b]


@njit(parallel=True, cache=True)
def vote_and_drop(
    new: New, rules: Rules, where: Array, kept: Array, moves: Array, dropped: Array
) -> None:
    """What a row's heads share: the vote, the list of moves, token numbers and interaction keys."""
    for b in prange(len(kept)):
        dropped[b] = -1
        moves[b, 0, 0] = -1
        if new.active[b]:
            kept[b] = vote_in_row(b, new, rules, where[b], kept[b], moves[b], dropped[b])


# a function of its own: in a parallel kernel, Numba takes writes to arrays at an address for dead
@njit(cache=True, fastmath=FASTMATH)
def vote_in_row(
    b: int, new: New, rules: Rules, where: Array, n: int, moves: Array, dropped: Array
) -> int:
    """The number of tokens that stay of n; the new one is stored behind them."""
    query_int, number, also_drop = new.query_int[b], new.number[b], new.also_drop[b]
    beta, threshold = np.float32(rules.beta), np.float32(rules.threshold)
    R, E, scaled = len(query_int), new.extra.shape[1], new.key_int_scale.shape[1] > 0
    capacity = where[CAPACITY]
    token = at(where[TOKEN], (capacity,), moves)
    key_int = at(where[KEY_INT], (capacity, R), new.key_int)
    key_int_scale = at(where[KEY_INT_SCALE], (capacity if scaled else 0,), new.key_scale)
    extra = at(where[EXTRA], (capacity, E), new.extra)
    for j in range(n):
        out = len(also_drop) > 0 and also_drop[j]
        if R and token[j] >= rules.protect_first and number - token[j] > rules.protect_recent:
            s = np.float32(0)
            for r in range(R):
                s += query_int[r] * widen(key_int[j, r])
            if scaled:
                s *= widen(key_int_scale[j])
            out |= s + beta <= threshold
        if out:
            dropped[j] = token[j]
    n = plan(dropped, n, moves)
    m = 0
    while moves[m, 0] >= 0:
        source, slot = moves[m]
        token[slot] = token[source]
        key_int[slot] = key_int[source]
        extra[slot] = extra[source]
        if scaled:
            key_int_scale[slot] = key_int_scale[source]
        m += 1
    token[n], key_int[n], extra[n] = number, new.key_int[b], new.extra[b]
    if scaled:
        key_int_scale[n] = new.key_int_scale[b, 0]
    return n


@njit(cache=True)
def plan(dropped: Array, n: int, moves: Array) -> int:
    """The last survivors of a row's n tokens move into the slots of the dropped; how many stay."""
    j = m = 0
    while j < n:
        if dropped[j] >= 0:
            n -= 1
            while n > j and dropped[n] >= 0:
                n -= 1
            if n > j:
                moves[m, 0], moves[m, 1] = n, j
                m += 1
        j += 1
    moves[m, 0] = -1
    return n


@njit(parallel=True, cache=True)
def insert_and_attend(
    threads: int, new: New, rules: Rules, where: Array, kept: Array, moves: Array, p: Array,
    output: Array,
) -> None:  # fmt: skip
    """Per key head: carry out the moves, store the new token, attend to the row's prefix."""
    (B, H), G = new.key.shape[:2], new.query.shape[1] // new.key.shape[1]
    # reshaped, not sliced, so that the compiler still knows that the arrays are contiguous
    query = new.query.reshape((B, H, G, new.query.shape[3]))
    output = output.reshape((B, H, G, output.shape[3]))
    p = p.reshape((B, H, G, p.shape[2]))
    # a thread gets some heads of every row, long or short, and one after the other those that lie
    # side by side: what is asked of memory ahead of one is the next one's
    share = (H + threads - 1) // threads
    for task in prange(H * B):
        first = task // (share * B) * share
        width = min(share, H - first)
        b, h = (task - first * B) // width, first + (task - first * B) % width
        if new.active[b]:
            attend_in_row(
                b, h, new, rules, where[b], kept[b], moves[b], query[b, h], p[b, h], output[b, h]
            )
        else:
            p[b, h] = 0
            scale = widen(new.value_scale[b, h]) if new.value_scale.shape[1] else np.float32(1)
            for g in range(G):
                for d in range(output.shape[3]):
                    output[b, h, g, d] = widen(new.value[b, h, 0, d]) * scale


@njit(cache=True, fastmath=FASTMATH)
def attend_in_row(
    b: int, h: int, new: New, rules: Rules, where: Array, n: int, moves: Array, query: Array,
    p: Array, output: Array,
) -> None:  # fmt: skip
    """One key head of one row; its n survivors are where the vote left them, by `moves`."""
    scaled, size = new.key_scale.shape[1] > 0, new.key.itemsize
    capacity, D, Dv = where[CAPACITY], new.key.shape[3], new.value.shape[3]
    k = at(where[KEYS] + h * capacity * D * size, (capacity, D), new.key)
    v = at(where[VALUES] + h * capacity * Dv * size, (capacity, Dv), new.key)
    slots = (capacity if scaled else 0,)
    k_scale = at(where[KEY_SCALE] + h * capacity * 2, slots, new.key_scale)
    v_scale = at(where[VALUE_SCALE] + h * capacity * 2, slots, new.key_scale)
    m = 0
    while moves[m, 0] >= 0:
        source, slot = moves[m]
        k[slot] = k[source]
        v[slot] = v[source]
        if scaled:
            k_scale[slot], v_scale[slot] = k_scale[source], v_scale[source]
        m += 1
    k[n], v[n] = new.key[b, h, 0], new.value[b, h, 0]
    if scaled:
        k_scale[n], v_scale[n] = new.key_scale[b, h], new.value_scale[b, h]
    # weights that are not wanted take a few hundred bytes, which stay in the cache
    weights = p if p.shape[1] else np.empty((len(query), n + 1), np.float32)
    scaling, softcap = np.float32(rules.scaling), np.float32(rules.softcap)
    attend(query, k, v, k_scale, v_scale, n + 1, scaling, softcap, weights, output)


@njit(cache=True, fastmath=FASTMATH)
def attend(
    query: Array,
    k: Array,
    v: Array,
    k_scale: Array,
    v_scale: Array,
    n: int,
    scaling: Scalar,
    softcap: Scalar,
    p: Array,
    output: Array,
) -> None:
    """One key head: its G queries take turns on each block of slots while it is in the cache.

    A slot's scales, if it has any, go into its logit and into its weight.
    """
    G = query.shape[0]  # query: (G, D), k: (S, D), v: (S, Dv), p: (G, S), output: (G, Dv)
    for start in range(0, n, BLOCK):
        dots(p, query, k, start, min(start + BLOCK, n))
    prefetch(v.ctypes.data)
    scaled = len(k_scale) > 0
    weights = np.empty((G, n), np.float32) if scaled else p
    for g in range(G):
        if scaled:
            scale(p[g, :n], k_scale)
        softmax(p[g, :n], scaling, softcap)
        p[g, n:] = 0
        if scaled:
            weights[g] = p[g, :n]
            scale(weights[g], v_scale)
        output[g] = 0
    for start in range(0, n, BLOCK):
        add_values(output, weights, v, start, min(start + BLOCK, n))


@njit(cache=True, fastmath=FASTMATH)
def scale(p: Array, scales: Array) -> None:
    for j in range(len(p)):
        p[j] *= widen(scales[j])


@njit(cache=True, fastmath=FASTMATH)
def softmax(p: Array, scaling: Scalar, softcap: Scalar) -> None:
    """Dot products become weights, in place."""
    n = len(p)
    for j in range(n):
        p[j] *= scaling
    if softcap > 0:
        for j in range(n):
            p[j] = math.tanh(p[j] / softcap) * softcap
    top = largest(p)
    total = np.float32(0)
    for j in range(n):
        p[j] = exp(p[j] - top)
        total += p[j]
    share = np.float32(1) / total
    for j in range(n):
        p[j] *= share


@njit(cache=True, fastmath=FASTMATH)
def largest(p: Array) -> Scalar:
    """Four maxima side by side: each number waits for the one before it, if NaN counts."""
    n = len(p)
    fours = n // 4 * 4
    a = b = c = d = p[0]
    for j in range(0, fours, 4):
        a, b, c, d = max(a, p[j]), max(b, p[j + 1]), max(c, p[j + 2]), max(d, p[j + 3])
    for j in range(fours, n):
        a = max(a, p[j])
    return max(max(a, b), max(c, d))


@njit(cache=True, fastmath=FASTMATH)
def dots(logit: Array, query: Array, k: Array, start: int, stop: int) -> None:
    """logit[g, j] = query[g]·k[j] for the slots from start to stop."""
    G, D = query.shape
    whole = D // LANES * LANES
    for g in range(0, G - 2, 3):
        dots_of(logit, query, g, k, start, stop, whole, 3)
    if G % 3 == 2:
        dots_of(logit, query, G - 2, k, start, stop, whole, 2)
    if G % 3 == 1:
        dots_of(logit, query, G - 1, k, start, stop, whole, 1)
    for g in range(G if whole < D else 0):
        for j in range(start, stop):
            for d in range(whole, D):
                logit[g, j] += query[g, d] * widen(k[j, d])


@njit(inline="always")
def dots_of(
    logit: Array, query: Array, g: int, k: Array, start: int, stop: int, whole: int, heads: int
) -> None:
    """`dots` for a constant number of heads, of the first `whole` numbers of each row."""
    fours = start + (stop - start) // 4 * 4
    for j in range(start, fours, 4):
        dot_tile(logit, query, g, k, j, whole, heads, 4)
    for j in range(fours, stop):
        dot_tile(logit, query, g, k, j, whole, heads, 1)


@njit(cache=True, fastmath=FASTMATH)
def add_values(out: Array, p: Array, v: Array, start: int, stop: int) -> None:
    """out[g] += Σ p[g, j] v[j] over the slots from start to stop."""
    G, D = out.shape
    whole = D // LANES * LANES
    for g in range(0, G - 2, 3):
        add_values_of(out, p, g, v, start, stop, whole, 3)
    if G % 3 == 2:
        add_values_of(out, p, G - 2, v, start, stop, whole, 2)
    if G % 3 == 1:
        add_values_of(out, p, G - 1, v, start, stop, whole, 1)
    for g in range(G if whole < D else 0):
        for j in range(start, stop):
            for d in range(whole, D):
                out[g, d] += p[g, j] * widen(v[j, d])


@njit(inline="always")
def add_values_of(
    out: Array, p: Array, g: int, v: Array, start: int, stop: int, whole: int, heads: int
) -> None:
    """`add_values` for a constant number of heads, of the first `whole` numbers of each row."""
    eights = 0
    if heads == 1:
        # whole rows of 64 numbers, so that memory is read in order
        eights = whole // (8 * LANES) * (8 * LANES)
        for d in range(0, eights, 8 * LANES):
            value_tile(out, d, p, g, v, start, stop, heads, 8)
    fours = eights + (whole - eights) // (4 * LANES) * (4 * LANES)
    for d in range(eights, fours, 4 * LANES):
        value_tile(out, d, p, g, v, start, stop, heads, 4)
    for d in range(fours, whole, LANES):
        value_tile(out, d, p, g, v, start, stop, heads, 1)


@njit(parallel=True, cache=True)
def remove(where: Array, kept: Array, mask: Array, moves: Array, widths: Array) -> None:
    """Free the slots of `mask` (B, S) uint8; widths: heads and bytes per slot of each column."""
    for b in prange(len(kept)):
        kept[b] = remove_in_row(where[b], kept[b], mask[b], moves[b], widths)


@njit(cache=True)
def remove_in_row(where: Array, n: int, mask: Array, moves: Array, widths: Array) -> int:
    dropped = np.empty(n, np.int64)
    for j in range(n):
        dropped[j] = 0 if mask[j] else -1
    n = plan(dropped, n, moves)
    for c in range(len(widths)):
        heads, size = widths[c]
        column = at(where[c], (heads, where[CAPACITY], size), mask)
        m = 0
        while moves[m, 0] >= 0:
            source, slot = moves[m]
            for h in range(heads):
                for i in range(size):
                    column[h, slot, i] = column[h, source, i]
            m += 1
    return n
