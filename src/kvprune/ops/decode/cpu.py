"""The decode step on packed rows by Numba kernels; float32, bfloat16, float16 and int8 storage."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

from kvprune.ops.decode import kernels
from kvprune.ops.decode.kernels import New, Result, Rows, Rules
from kvprune.ops.decode.reference import Decoded, NewToken, Votes
from kvprune.ops.decode.table import Table, join_columns
from kvprune.ops.form import AttentionForm
from kvprune.ops.int8 import quantise
from kvprune.ops.jit import Array
from kvprune.ops.threads import use_threads

EMPTY = torch.zeros(1, 0)

# up to this many bytes one thread finishes before a second has woken up
ONE_THREAD = 2**19

# memory for the lists of moves, one per thread that decodes: no table pays for it
SCRATCH = threading.local()


def decode(
    table: Table,
    new: NewToken,
    form: AttentionForm,
    *,
    votes: Votes | None = None,
    also_drop: Tensor | None = None,
    weights: bool = False,
) -> Decoded:
    """`reference.decode`, but every row reads exactly its own survivors, once.

    Rows are dense prefixes before and after: a dropped token's slot goes to the row's last token,
    so uneven rows cost neither masked reads nor a consolidation.
    """
    query, key, value, number, active, extra = new
    B, Hq = query.shape[:2]
    if votes is None:
        votes = Votes(EMPTY.expand(B, 0), EMPTY.expand(B, 0), 0.0)
    if extra or table.extra or (key.shape, value.shape, votes.key_int.shape) != table.shapes:
        own = {"keys": key, "values": value, "key_int": votes.key_int[:, None]}
        table.check({**own, "token": number[:, None], **extra})
    places, also_drop = table.prepare(also_drop)
    S = int(places.kept.max(initial=0))
    f32 = torch.float32
    if places.rotation is not None:
        # one product for both: a call takes longer than these numbers
        rotated = torch.cat((query, key), 1).float() @ places.rotation
        query, key = rotated.split((Hq, key.shape[1]), 1)
    new_key, new_value, key_scale, value_scale = stored_heads(key, value, places.stored)
    key_int, key_int_scale = stored_interaction(votes.key_int, places.int_stored)
    arrays = New(
        array(query, f32), new_key, new_value, key_scale, value_scale,
        array(votes.query_int, f32), key_int, key_int_scale,
        array(join_columns(extra, number[:, None])[:, 0], f32),
        array(number, torch.int64),
        np.ones(B, np.bool_) if active is None else array(active),
        np.empty((B, 0), np.bool_) if also_drop is None else array(also_drop),
    )  # fmt: skip
    rules = Rules(
        float(votes.beta), votes.threshold, votes.protect_first, votes.protect_recent,
        float(form.scaling), float(form.softcap or 0.0),
    )  # fmt: skip
    p = torch.empty(B, Hq, S + 1) if weights else None
    output = torch.empty(B, Hq, 1, value.shape[-1])
    result = Result(
        # in NumPy, which is faster; the others in torch, which aligns them for vector stores
        dropped=np.empty((B, S), np.int64),
        weights=np.empty((B, Hq, 0), np.float32) if p is None else p.numpy(),
        output=output.numpy(),
    )
    rows = Rows(places.where, places.kept, scratch(B, S + 2))
    small = int(places.kept.sum()) * places.slot_nbytes <= ONE_THREAD
    kernels.step(use_threads(1 if small else None), *arrays, *rules, *rows, *result)
    table.finish()
    dropped = torch.from_numpy(result.dropped)
    output = output if new.query.dtype is f32 else output.to(new.query.dtype)
    return Decoded(output, dropped, None if p is None else p[..., : table.width])


def remove(table: Table, mask: Tensor) -> None:
    """`reference.remove`: free slots, and fill them with the last tokens of their rows."""
    places, packed = table.prepare(mask, room=0)
    assert packed is not None
    use_threads(1 if int(places.kept.sum()) * places.slot_nbytes <= ONE_THREAD else None)
    kernels.remove(
        places.where,
        places.kept,
        array(packed).view(np.uint8),
        scratch(len(places.kept), packed.shape[1] + 2),
        places.widths,
    )
    table.finish()


def scratch(rows: int, width: int) -> Array:
    """An array (rows, width, 2) of int32 with any contents."""
    size = rows * width * 2
    memory: Array | None = getattr(SCRATCH, "memory", None)
    if memory is None or len(memory) < size:
        memory = SCRATCH.memory = np.empty(2 * size, np.int32)
    return memory[:size].reshape(rows, width, 2)


def stored_heads(
    key: Tensor, value: Tensor, dtype: torch.dtype
) -> tuple[Array, Array, Array, Array]:
    """A new token's key and value as they are stored, and their scales (B, H or 0)."""
    if dtype is not torch.int8:
        none = np.empty((len(key), 0), np.int16)
        return array(key, dtype), array(value, dtype), none, none
    if key.shape == value.shape:
        # at once: a call takes longer than one token's numbers
        both, scales = quantise(torch.stack((key.float(), value.float())))
        (key, value), (key_scale, value_scale) = both, scales
    else:
        (key, key_scale), (value, value_scale) = quantise(key), quantise(value)
    return array(key), array(value), array(key_scale[:, :, 0]), array(value_scale[:, :, 0])


def stored_interaction(key_int: Tensor, dtype: torch.dtype) -> tuple[Array, Array]:
    """A new token's interaction key as it is stored, and its scale (B, 1 or 0)."""
    if dtype is not torch.int8:
        return array(key_int, dtype), np.empty((len(key_int), 0), np.int16)
    numbers, scale = quantise(key_int)
    return array(numbers), array(scale[:, None])


def array(x: Tensor, dtype: torch.dtype | None = None) -> Array:
    """A contiguous NumPy array of the tensor; dtypes that NumPy lacks as in `BITS`.

    A conversion that changes nothing costs as much as one that does.
    """
    if dtype is not None and x.dtype is not dtype:
        x = x.to(dtype)
    if x.requires_grad:
        x = x.detach()
    if not x.is_contiguous():
        x = x.contiguous()
    if x.dtype is torch.bfloat16:
        return x.view(torch.uint16).numpy()
    return x.view(torch.int16).numpy() if x.dtype is torch.float16 else x.numpy()
