"""The decode step's kernels for GPUs: insert, vote, drop and attend at once, then close the holes.

A program is one key head of one row, or one of several spans of it. Rows lie where `PLACES` says;
`table` is the row's line of it. A kernel reads every number as float32: a product of bfloat16,
float16 or int8 in TF32, which has room for all of their digits, is exact.
"""

from __future__ import annotations

import triton.language as tl

from kvprune.ops.decode.table import PLACES
from kvprune.ops.gpu import Block, jit, jit_with

KEYS, VALUES, KEY_SCALE, VALUE_SCALE, KEY_INT, KEY_INT_SCALE, EXTRA, TOKEN, CAPACITY = (
    tl.constexpr(index) for index in range(len(PLACES))
)
COLUMNS = tl.constexpr(len(PLACES))


@jit
def column(table: Block, index: tl.constexpr, dtype: tl.constexpr, ALIGN: tl.constexpr) -> Block:
    """Where a column of a row begins."""
    pointer = tl.load(table + index).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, ALIGN)


@jit
def logits(dots: Block, scaling: Block, softcap: Block, CAPPED: tl.constexpr) -> Block:
    x = dots * scaling
    if CAPPED:
        # tanh x = 1 − 2 / (e^2x + 1), also where e^2x is infinite or 0
        x = softcap * (1 - 2 / (tl.exp(2 * x / softcap) + 1))
    return x


@jit
def loses(
    score: Block, token: Block, number: Block, threshold: Block, first: Block, recent: Block
) -> Block:
    """Which tokens a vote drops; a score of NaN keeps."""
    return (score <= threshold) & (token >= first) & (number - token > recent)


@jit_with(do_not_specialize=["width", "also_width", "protect_first", "protect_recent"])
def attend(
    where: Block, kept: Block, query: Block, key: Block, value: Block, key_scale: Block,
    value_scale: Block, query_int: Block, key_int: Block, key_int_scale: Block, extra: Block,
    number: Block, active: Block, also_drop: Block, beta: Block, dropped: Block, output: Block,
    top: Block, total: Block, threshold: Block, protect_first: Block, protect_recent: Block,
    scaling: Block, softcap: Block, width: Block, also_width: Block,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr,
    E: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    INT: tl.constexpr, EXTRAS: tl.constexpr, STORED: tl.constexpr, INT_STORED: tl.constexpr,
    SCALED: tl.constexpr, INT_SCALED: tl.constexpr, VOTES: tl.constexpr, PADDED: tl.constexpr,
    ALSO: tl.constexpr, CAPPED: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGN: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """One span of one key head: its G queries attend to what the vote leaves.

    The first span begins with the new token itself, which is stored behind the row's last one;
    the first head writes down who left. Without splits `output` is the result, otherwise each
    span's own, with the largest logit and the sum of weights that `combine` needs.
    """
    b, h, span = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, d, dv = tl.arange(0, GROUP), tl.arange(0, KEY), tl.arange(0, VALUE)
    own_g, own_d, own_dv = g < G, d < D, dv < DV
    table = where + b * COLUMNS
    capacity = tl.multiple_of(tl.load(table + CAPACITY), 4)
    token, now = column(table, TOKEN, tl.int32, ALIGN), tl.load(number + b)
    keys = column(table, KEYS, STORED, ALIGN) + h * capacity * D
    values = column(table, VALUES, STORED, ALIGN) + h * capacity * DV
    key_scales = column(table, KEY_SCALE, tl.float16, 2) + h * capacity
    value_scales = column(table, VALUE_SCALE, tl.float16, 2) + h * capacity
    keys_int = column(table, KEY_INT, INT_STORED, ALIGN)
    keys_int_scales = column(table, KEY_INT_SCALE, tl.float16, 2)
    n, end, is_active = tl.load(kept + b), tl.load(kept + b), span == 0
    if PADDED:
        is_active = is_active & (tl.load(active + b) != 0)
        n = tl.where(tl.load(active + b) != 0, n, 0)
    # a condition that all share goes into a mask as a limit: the interpreter takes no other
    inserted = tl.where(is_active, 2**20, 0)
    listed = tl.where(h == 0, n, 0)

    head = b * H + h
    q = tl.load(
        query + (head * G + g[:, None]) * D + d[None, :],
        mask=own_g[:, None] & own_d[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    new_key = tl.load(key + head * D + d, mask=own_d, other=0)
    new_value = tl.load(value + head * DV + dv, mask=own_dv, other=0)
    own_key, own_value = new_key.to(tl.float32), new_value.to(tl.float32)
    tl.store(keys + end * D + d, new_key, mask=own_d & (d < inserted))
    tl.store(values + end * DV + dv, new_value, mask=own_dv & (dv < inserted))
    if SCALED:
        new_key_scale, new_value_scale = tl.load(key_scale + head), tl.load(value_scale + head)
        own_key, own_value = own_key * new_key_scale, own_value * new_value_scale
        tl.store(key_scales + end, new_key_scale, mask=is_active)
        tl.store(value_scales + end, new_value_scale, mask=is_active)
    r = tl.arange(0, INT)
    if h == 0:
        tl.store(token + end, now.to(tl.int32), mask=is_active)
        new_int = tl.load(key_int + b * R + r, mask=r < R, other=0)
        tl.store(keys_int + end * R + r, new_int, mask=(r < R) & (r < inserted))
        if INT_SCALED:
            tl.store(keys_int_scales + end, tl.load(key_int_scale + b), mask=is_active)
        if E:
            e = tl.arange(0, EXTRAS)
            extras = column(table, EXTRA, tl.float32, 4) + end * E
            tl.store(
                extras + e, tl.load(extra + b * E + e, mask=e < E), mask=(e < E) & (e < inserted)
            )

    q_int = tl.load(query_int + b * R + r, mask=r < R, other=0.0)
    offset = tl.load(beta)
    own = logits(tl.sum(q * own_key[None, :], 1), scaling, softcap, CAPPED)  # (GROUP,)
    first = span == 0
    peak = tl.where(first, own, float("-inf"))
    mass = tl.where(first, 1.0, 0.0) + tl.zeros((GROUP,), tl.float32)
    out = tl.where(first, own_value[None, :], 0.0) + tl.zeros((GROUP, VALUE), tl.float32)
    # as many slots for each span, in whole blocks: the row is divided by what is alive
    share = tl.cdiv(tl.cdiv(n, SPLITS), BLOCK) * BLOCK
    for start in range(span * share, tl.minimum(n, (span + 1) * share), BLOCK):
        j = start + tl.arange(0, BLOCK)
        live = j < n
        tokens = tl.load(token + j, mask=live, other=0).to(tl.int64)
        gone = tokens < 0
        if ALSO:
            gone = tl.load(also_drop + b * also_width + j, mask=live, other=0) != 0
        if VOTES:
            at = j[:, None] * R + r[None, :]
            k_int = tl.load(keys_int + at, mask=live[:, None] & (r < R)[None, :], other=0)
            score = tl.sum(k_int.to(tl.float32) * q_int[None, :], 1)
            if INT_SCALED:
                score = score * tl.load(keys_int_scales + j, mask=live, other=0.0).to(tl.float32)
            voted = loses(score + offset, tokens, now, threshold, protect_first, protect_recent)
            gone = gone | voted
        gone = gone & live
        tl.store(dropped + b * width + j, tokens, mask=gone & (j < listed))
        # numbers, since the compiler cannot bring single bits from one layout into another
        bias = tl.where(live & (gone == 0), 0.0, float("-inf"))
        at = j[:, None] * D + d[None, :]
        k = tl.load(keys + at, mask=live[:, None] & own_d[None, :], other=0).to(tl.float32)
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # (GROUP, BLOCK)
        if SCALED:
            k_scale = tl.load(key_scales + j, mask=live, other=0.0).to(tl.float32)
            dots = dots * k_scale[None, :]
        logit = logits(dots, scaling, softcap, CAPPED) + bias[None, :]
        new_peak = tl.maximum(peak, tl.max(logit, 1))
        # a span of which nothing stayed so far has no peak: −∞ − (−∞) is not a number
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p, fade = tl.exp(logit - base[:, None]), tl.exp(peak - base)
        mass, peak = mass * fade + tl.sum(p, 1), new_peak
        at = j[:, None] * DV + dv[None, :]
        v = tl.load(values + at, mask=live[:, None] & own_dv[None, :], other=0).to(tl.float32)
        if SCALED:
            p = p * tl.load(value_scales + j, mask=live, other=0.0).to(tl.float32)[None, :]
        out = out * fade[:, None] + tl.dot(p, v, input_precision=PRECISION)

    line = (head * G + g) * SPLITS + span
    if SPLITS == 1:
        out = out / mass[:, None]
    else:
        tl.store(top + line, peak, mask=own_g)
        tl.store(total + line, mass, mask=own_g)
    at = line[:, None] * DV + dv[None, :]
    out = out.to(output.dtype.element_ty)
    tl.store(output + at, out, mask=own_g[:, None] & own_dv[None, :])


@jit
def combine(
    parts: Block, top: Block, total: Block, output: Block,
    DV: tl.constexpr, VALUE: tl.constexpr, SPLITS: tl.constexpr,
) -> None:  # fmt: skip
    """One query head: out = Σ e^(top_s − max top) parts_s / Σ e^(top_s − max top) total_s."""
    line, s, dv = tl.program_id(0).to(tl.int64), tl.arange(0, SPLITS), tl.arange(0, VALUE)
    # the first span holds the new token: the peak is finite
    peaks = tl.load(top + line * SPLITS + s)
    share = tl.exp(peaks - tl.max(peaks, 0))
    mass = tl.sum(share * tl.load(total + line * SPLITS + s), 0)
    at = (line * SPLITS + s[:, None]) * DV + dv[None, :]
    part = tl.load(parts + at, mask=(dv < DV)[None, :], other=0.0)
    out = (tl.sum(part * share[:, None], 0) / mass).to(output.dtype.element_ty)
    tl.store(output + line * DV + dv, out, mask=dv < DV)


@jit_with(do_not_specialize=["width"])
def plan(
    kept: Block, active: Block, dropped: Block, moves: Block, count: Block, width: Block,
    PADDED: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row: its last survivors will move into the slots of the dropped; how many stay.

    NEW tokens, none or one, lie behind the others. moves: (B, width, 2), from and to.
    """
    b = tl.program_id(0).to(tl.int64)
    old = tl.load(kept + b)
    new = old * 0 + NEW
    if PADDED:
        new = tl.where(tl.load(active + b) != 0, new, 0)
    gone = old * 0
    for start in range(0, old, BLOCK):
        j = start + tl.arange(0, BLOCK)
        out = tl.load(dropped + b * width + j, mask=j < old, other=-1) >= 0
        gone += tl.sum(out.to(tl.int64), 0)
    left = old + new - gone
    holes = old * 0
    for start in range(0, left, BLOCK):
        j = start + tl.arange(0, BLOCK)
        out = tl.load(dropped + b * width + j, mask=j < tl.minimum(old, left), other=-1) >= 0
        rank = holes + tl.cumsum(out.to(tl.int64), 0) - 1
        tl.store(moves + (b * width + rank) * 2 + 1, j.to(tl.int32), mask=out)
        holes += tl.sum(out.to(tl.int64), 0)
    found = old * 0
    for start in range(left, old + new, BLOCK):
        j = start + tl.arange(0, BLOCK)
        out = tl.load(dropped + b * width + j, mask=j < old, other=-1) >= 0
        stays = (j < old + new) & (out == 0)
        rank = found + tl.cumsum(stays.to(tl.int64), 0) - 1
        tl.store(moves + (b * width + rank) * 2, j.to(tl.int32), mask=stays)
        found += tl.sum(stays.to(tl.int64), 0)
    tl.store(count + b, holes)
    tl.store(kept + b, left)


@jit_with(do_not_specialize=["width"])
def move(
    where: Block, moves: Block, count: Block, width: Block,
    H: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, R: tl.constexpr, E: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, INT: tl.constexpr, EXTRAS: tl.constexpr,
    STORED: tl.constexpr, INT_STORED: tl.constexpr, SCALED: tl.constexpr,
    INT_SCALED: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr,
) -> None:  # fmt: skip
    """One key head of one row, or what its heads share: carry out the moves.

    What moves lies behind the row's new end and goes before it: no move reads what another wrote.
    """
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    table = where + b * COLUMNS
    capacity = tl.multiple_of(tl.load(table + CAPACITY), 4)
    for start in range(0, tl.load(count + b), BLOCK):
        i = start + tl.arange(0, BLOCK)
        own = i < tl.load(count + b)
        pair = moves + (b * width + i) * 2
        source = tl.load(pair, mask=own, other=0).to(tl.int64)
        slot = tl.load(pair + 1, mask=own, other=0).to(tl.int64)
        if h < H:
            keys = column(table, KEYS, STORED, ALIGN) + h * capacity * D
            carry(keys, source, slot, own, D, KEY)
            values = column(table, VALUES, STORED, ALIGN) + h * capacity * DV
            carry(values, source, slot, own, DV, VALUE)
            if SCALED:
                carry(
                    column(table, KEY_SCALE, tl.float16, 2) + h * capacity, source, slot, own, 1, 1
                )
                carry(
                    column(table, VALUE_SCALE, tl.float16, 2) + h * capacity,
                    source,
                    slot,
                    own,
                    1,
                    1,
                )
        else:
            carry(column(table, TOKEN, tl.int32, 4), source, slot, own, 1, 1)
            if R:
                carry(column(table, KEY_INT, INT_STORED, ALIGN), source, slot, own, R, INT)
            if E:
                carry(column(table, EXTRA, tl.float32, 4), source, slot, own, E, EXTRAS)
            if INT_SCALED:
                carry(column(table, KEY_INT_SCALE, tl.float16, 2), source, slot, own, 1, 1)


@jit
def carry(
    column: Block, source: Block, slot: Block, own: Block, SIZE: tl.constexpr, WIDE: tl.constexpr
) -> None:
    """Copy slots of one column to other slots."""
    d = tl.arange(0, WIDE)
    mask = own[:, None] & (d < SIZE)[None, :]
    numbers = tl.load(column + source[:, None] * SIZE + d[None, :], mask=mask)
    tl.store(column + slot[:, None] * SIZE + d[None, :], numbers, mask=mask)
