"""The decode step as Numba kernels over packed rows; float32 and bfloat16 storage."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numba import njit, prange
from torch import Tensor

from kvprune.ops.decode.reference import Decoded, Votes
from kvprune.ops.decode.scalar import exp, widen
from kvprune.ops.threads import use_threads
from kvprune.slots import SlotTable

# NumPy has no bfloat16: it travels as its bits, and the kernel widens them as it reads
DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}

# sums may be reordered; NaN and infinities keep their meaning
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

# slots that stay in the first-level cache while the query heads of a group take turns
BLOCK = 32

NOBODY = torch.zeros(1, 0)

# up to so many bytes one thread is done before a second has woken up
ONE_THREAD = 2**19


class Workspace(NamedTuple):
    """A table's columns as NumPy arrays and room for a step's lists, made once for the columns.

    A step of a small model takes less time than a dozen conversions.
    """

    owners: tuple[Tensor, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the keys, values and interaction keys of a new token
    key_int: np.ndarray
    token: np.ndarray
    valid: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    kept: np.ndarray  # (B,)
    moves: np.ndarray  # (B, capacity + 1, 2): slot left, slot taken; −1 ends the list
    everybody: np.ndarray  # (B,), for a step in which all rows are active
    nobody: np.ndarray  # (B, 0), for a step in which nothing but votes drops
    no_weights: np.ndarray  # (B, H, 0)


WORKSPACES: WeakKeyDictionary[SlotTable, Workspace] = WeakKeyDictionary()


def workspace(table: SlotTable) -> Workspace:
    owners = table.key_int, table.token, table.valid, table.keys, table.values
    made = WORKSPACES.get(table)
    if made is None or any(map(operator.is_not, made.owners, owners)):
        (B, S), H = table.valid.shape, table.keys.shape[1]
        sizes = [column.shape[-1] for column in (table.keys, table.values, table.key_int)]
        shapes = (B, H, 1, sizes[0]), (B, H, 1, sizes[1]), (B, sizes[2])
        key_int, token, valid, keys, values = map(array, owners)
        made = WORKSPACES[table] = Workspace(
            owners, shapes, key_int, token, valid, keys, values,
            kept=np.empty(B, np.int64), moves=np.empty((B, S + 1, 2), np.int64),
            everybody=np.ones(B, np.bool_), nobody=np.empty((B, 0), np.bool_),
            no_weights=np.empty((B, H, 0), np.float32),
        )  # fmt: skip
    return made


def decode(
    table: SlotTable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    token: Tensor,
    *,
    scaling: float,
    votes: Votes | None = None,
    softcap: float | None = None,
    active: Tensor | None = None,
    also_drop: Tensor | None = None,
    weights: bool = False,
    extra: Mapping[str, Tensor] | None = None,
) -> Decoded:
    """`reference.decode`, but every row reads exactly its own survivors, once.

    Rows are dense prefixes before and after: a loser's slot goes to the row's last token, so
    uneven rows cost neither masked reads nor a consolidation.
    """
    B, Hq = query.shape[:2]  # query: (B, Hq, 1, D), key: (B, H, 1, D), value: (B, H, 1, Dv)
    rules = votes or Votes(NOBODY.expand(B, 0), NOBODY.expand(B, 0), 0.0)
    also_drop = packed(table, also_drop)
    S = table.width
    table.reserve(S + 1)
    made = workspace(table)
    if (key.shape, value.shape, rules.key_int.shape) != made.shapes or extra or table.extra:
        keys_int, tokens = rules.key_int[:, None], token[:, None]
        new = {"keys": key, "values": value, "key_int": keys_int, "token": tokens}
        table.check({**new, **(extra or {})})
    on = made.everybody if active is None else array(active)
    f32, stored = torch.float32, table.keys.dtype
    dropped = torch.empty(B, S, dtype=torch.int64)
    p = torch.empty(B, Hq, S + 1) if weights else None
    output = torch.empty(B, Hq, 1, value.shape[-1])
    small = S * key.element_size() * (key.numel() + value.numel()) <= ONE_THREAD
    use_threads(1 if small else None)
    width = step(
        array(query, f32), array(key, stored), array(value, stored),
        array(rules.query_int, f32), array(rules.key_int, f32), array(token, torch.int64), on,
        made.nobody if also_drop is None else array(also_drop),
        float(rules.beta), rules.threshold, rules.protect_first, rules.protect_recent,
        float(scaling), float(softcap or 0.0), made.key_int, made.token, made.valid, made.keys,
        made.values, made.kept, made.moves, dropped.numpy(),
        made.no_weights if p is None else p.numpy(), output.numpy(),
    )  # fmt: skip
    for name, x in (extra or {}).items():
        follow(table.columns[name], x, *map(torch.from_numpy, (on, made.kept, made.moves)))
    table.width = table.longest = width
    table.consolidate()
    output = output if query.dtype is f32 else output.to(query.dtype)
    return Decoded(output, dropped, None if p is None else p[..., :width])


def packed(table: SlotTable, mask: Tensor | None) -> Tensor | None:
    """Pack the table; a mask over its slots rides along as one more column."""
    if mask is None or table.packed:
        table.pack()
        return mask
    table.columns["mask"] = table.valid.new_zeros(table.valid.shape)
    table.columns["mask"][:, : table.width] = mask
    table.pack()
    return table.columns.pop("mask")[:, : table.width]


def array(x: Tensor, dtype: torch.dtype | None = None) -> np.ndarray:
    """The tensor as NumPy sees it; a call that changes nothing costs as much as one that does."""
    if dtype is not None and x.dtype is not dtype:
        x = x.to(dtype)
    if x.requires_grad:
        x = x.detach()
    if not x.is_contiguous():
        x = x.contiguous()
    return (x.view(DTYPES[x.dtype]) if x.dtype is torch.bfloat16 else x).numpy()


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


def follow(column: Tensor, new: Tensor, active: Tensor, kept: Tensor, moves: Tensor) -> None:
    """An extra column goes where its tokens went."""
    moving = (moves[:, :, 0] >= 0).cumprod(1).bool()  # (B, S + 1), up to the first −1
    rows = moving.nonzero()[:, 0]
    source, slot = moves[moving].unbind(1)
    column[rows, slot] = column[rows, source]
    rows = active.nonzero()[:, 0]
    column[rows, kept[rows]] = new[rows, 0]
