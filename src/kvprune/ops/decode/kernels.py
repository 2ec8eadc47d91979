"""The decode step's kernels: vote, drop, move, insert, attend, over rows that are dense prefixes.

Arrays come from `cpu.decode`; a stored bfloat16 arrives as its bits.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit, prange

from kvprune.ops.decode.scalar import exp, widen

# sums may be reordered; NaN and infinities keep their meaning
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

# slots that stay in the first-level cache while the query heads of a group take turns
BLOCK = 32


@njit(cache=True)
def step(
    query,
    new_key,
    new_value,
    q_int,
    new_int,
    new_token,
    active,
    also_drop,
    beta,
    threshold,
    protect_first,
    protect_recent,
    scaling,
    softcap,
    key_int,
    token,
    valid,
    keys,
    values,
    kept,
    moves,
    dropped,
    p,
    output,
):
    """Both kernels in one call from Python; how many slots the longest row holds now."""
    vote_and_drop(
        q_int, new_int, new_token, active, also_drop, np.float32(beta), np.float32(threshold),
        protect_first, protect_recent, key_int, token, valid, kept, moves, dropped,
    )  # fmt: skip
    insert_and_attend(
        query, new_key, new_value, active, np.float32(scaling), np.float32(softcap), kept, moves,
        keys, values, p, output,
    )  # fmt: skip
    return (kept + active).max() if len(kept) else 0


@njit(parallel=True, cache=True, fastmath=FASTMATH)
def vote_and_drop(
    q_int,
    new_int,
    new_token,
    active,
    also_drop,
    beta,
    threshold,
    protect_first,
    protect_recent,
    key_int,
    token,
    valid,
    kept,
    moves,
    dropped,
):
    """Everything that a row's heads share: the vote, the list of moves, token and K_int."""
    (B, S), R = dropped.shape, q_int.shape[1]
    for b in prange(B):
        n = 0
        for j in range(S):
            n += valid[b, j]
            dropped[b, j] = -1
        moves[b, 0, 0] = -1
        kept[b] = n
        if not active[b]:
            continue
        for j in range(n):
            out = also_drop.shape[1] > 0 and also_drop[b, j]
            if R and token[b, j] >= protect_first and new_token[b] - token[b, j] > protect_recent:
                s = np.float32(0)
                for r in range(R):
                    s += q_int[b, r] * key_int[b, j, r]
                out |= s + beta <= threshold
            if out:
                dropped[b, j] = token[b, j]
        j = m = 0
        while j < n:
            if dropped[b, j] >= 0:
                n -= 1
                while n > j and dropped[b, n] >= 0:
                    n -= 1
                if n > j:
                    token[b, j] = token[b, n]
                    key_int[b, j] = key_int[b, n]
                    moves[b, m] = n, j
                    m += 1
            j += 1
        moves[b, m, 0] = -1
        valid[b, n:S] = False
        token[b, n], valid[b, n] = new_token[b], True
        key_int[b, n, :R] = new_int[b]
        kept[b] = n


@njit(parallel=True, cache=True, fastmath=FASTMATH)
def insert_and_attend(
    query, new_key, new_value, active, scaling, softcap, kept, moves, keys, values, p, output
):
    """Each key head: carry out the moves, store the new token, attend to the row's prefix."""
    (B, H), G = keys.shape[:2], query.shape[1] // keys.shape[1]
    # a slice of heads would lose the compiler's knowledge that numbers lie side by side
    query = query.reshape((B, H, G, query.shape[3]))
    output = output.reshape((B, H, G, output.shape[3]))
    p = p.reshape((B, H, G, p.shape[2]))
    # rows change fastest, so a thread's share holds long and short ones alike
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
        while moves[b, m, 0] >= 0:
            source, slot = moves[b, m]
            k[slot] = k[source]
            v[slot] = v[source]
            m += 1
        k[kept[b]], v[kept[b]] = new_key[b, h, 0], new_value[b, h, 0]
        n = kept[b] + 1
        # nobody asked for the weights: they live in a few hundred bytes, hot in the cache
        weights = p[b, h] if p.shape[3] else np.empty((G, n), np.float32)
        attend(query[b, h], k, v, n, scaling, softcap, weights, out)


@njit(cache=True, fastmath=FASTMATH)
def attend(query, k, v, n, scaling, softcap, p, output):
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
def softmax(p, scaling, softcap):
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
def dots(logit, q, k):
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
def add_values(out, p, v):
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
