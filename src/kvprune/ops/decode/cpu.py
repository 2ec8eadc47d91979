"""The decode step on packed rows by Numba kernels; float32 and bfloat16 storage."""

from __future__ import annotations

import operator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvprune.ops.decode.kernels import Columns, Moves, New, Result, Rules, step
from kvprune.ops.decode.reference import Decoded, NewToken, Votes
from kvprune.ops.decode.table import Table
from kvprune.ops.form import AttentionForm
from kvprune.ops.jit import Array
from kvprune.ops.threads import use_threads

EMPTY = torch.zeros(1, 0)

# up to this many bytes one thread finishes before a second has woken up
ONE_THREAD = 2**19


class Workspace(NamedTuple):
    """A table's columns as NumPy arrays, and memory for a step, until the columns change.

    A step of a small model takes less time than a dozen conversions.
    """

    tensors: tuple[Tensor, ...]  # those of the columns
    shapes: tuple[tuple[int, ...], ...]  # of the key, value and interaction key of a new token
    slot_bytes: int  # of the keys and values of one slot in all rows
    columns: Columns
    moves: Moves
    all_active: Array  # (B,)
    no_drops: Array  # (B, 0)
    no_weights: Array  # (B, H, 0)


WORKSPACES: WeakKeyDictionary[Table, Workspace] = WeakKeyDictionary()


def workspace(table: Table) -> Workspace:
    tensors = table.keys, table.values, table.key_int, table.token, table.valid
    space = WORKSPACES.get(table)
    if space is None or any(map(operator.is_not, space.tensors, tensors)):
        (B, S), H = table.valid.shape, table.keys.shape[1]
        sizes = [column.shape[-1] for column in tensors[:3]]
        space = WORKSPACES[table] = Workspace(
            tensors,
            shapes=((B, H, 1, sizes[0]), (B, H, 1, sizes[1]), (B, sizes[2])),
            slot_bytes=B * H * sum(sizes[:2]) * table.keys.element_size(),
            columns=Columns(*map(array, tensors)),
            moves=Moves(kept=np.empty(B, np.int64), slots=np.empty((B, S + 1, 2), np.int64)),
            all_active=np.ones(B, np.bool_),
            no_drops=np.empty((B, 0), np.bool_),
            no_weights=np.empty((B, H, 0), np.float32),
        )
    return space


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
    also_drop = packed(table, also_drop)
    S = table.width
    table.reserve(S + 1)
    space = workspace(table)
    if (key.shape, value.shape, votes.key_int.shape) != space.shapes or extra or table.extra:
        key_int, token = votes.key_int[:, None], number[:, None]
        columns = {"keys": key, "values": value, "key_int": key_int, "token": token}
        table.check({**columns, **extra})
    f32, stored = torch.float32, table.keys.dtype
    arrays = New(
        array(query, f32),
        array(key, stored),
        array(value, stored),
        array(votes.query_int, f32),
        array(votes.key_int, f32),
        array(number, torch.int64),
        space.all_active if active is None else array(active),
        space.no_drops if also_drop is None else array(also_drop),
    )
    rules = Rules(
        float(votes.beta), votes.threshold, votes.protect_first, votes.protect_recent,
        float(form.scaling), float(form.softcap or 0.0),
    )  # fmt: skip
    p = torch.empty(B, Hq, S + 1) if weights else None
    output = torch.empty(B, Hq, 1, value.shape[-1])
    result = Result(
        # in NumPy, which is faster; the others in torch, which aligns them for vector stores
        dropped=np.empty((B, S), np.int64),
        weights=space.no_weights if p is None else p.numpy(),
        output=output.numpy(),
    )
    use_threads(1 if S * space.slot_bytes <= ONE_THREAD else None)
    width = step(*arrays, *rules, *space.columns, *space.moves, *result)
    for name, x in extra.items():
        follow(table.columns[name], x, arrays.active, space.moves)
    table.width = table.longest = width
    table.consolidate()
    dropped = torch.from_numpy(result.dropped)
    output = output if query.dtype is f32 else output.to(query.dtype)
    return Decoded(output, dropped, None if p is None else p[..., :width])


def packed(table: Table, mask: Tensor | None) -> Tensor | None:
    """Pack the table; a mask over its slots is packed with it, as one more column."""
    if mask is None or table.packed:
        table.pack()
        return mask
    table.columns["mask"] = table.valid.new_zeros(table.valid.shape)
    table.columns["mask"][:, : table.width] = mask
    table.pack()
    return table.columns.pop("mask")[:, : table.width]


def array(x: Tensor, dtype: torch.dtype | None = None) -> Array:
    """A contiguous NumPy array of the tensor; bfloat16, which NumPy lacks, as its bits.

    A conversion that changes nothing costs as much as one that does.
    """
    if dtype is not None and x.dtype is not dtype:
        x = x.to(dtype)
    if x.requires_grad:
        x = x.detach()
    if not x.is_contiguous():
        x = x.contiguous()
    return (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x).numpy()


def follow(column: Tensor, new: Tensor, active: Array, moves: Moves) -> None:
    """Move and insert in an extra column as the kernels did in the others."""
    slots, kept = torch.from_numpy(moves.slots), torch.from_numpy(moves.kept)
    moving = (slots[:, :, 0] >= 0).cumprod(1).bool()  # (B, S + 1), up to the first −1
    rows = moving.nonzero()[:, 0]
    source, slot = slots[moving].unbind(1)
    column[rows, slot] = column[rows, source]
    rows = torch.from_numpy(active).nonzero()[:, 0]
    column[rows, kept[rows]] = new[rows, 0]
