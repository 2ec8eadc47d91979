"""The decode step on packed rows by Numba kernels; float32 and bfloat16 storage."""

from __future__ import annotations

import operator
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from kvprune.ops.decode.kernels import step
from kvprune.ops.decode.reference import Decoded, NewToken, Votes
from kvprune.ops.decode.table import Table
from kvprune.ops.form import AttentionForm
from kvprune.ops.threads import use_threads

# NumPy has no bfloat16: it travels as its bits, and the kernel widens them as it reads
DTYPES = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}

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


WORKSPACES: WeakKeyDictionary[Table, Workspace] = WeakKeyDictionary()


def workspace(table: Table) -> Workspace:
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
    table: Table,
    new: NewToken,
    form: AttentionForm,
    *,
    votes: Votes | None = None,
    also_drop: Tensor | None = None,
    weights: bool = False,
) -> Decoded:
    """`reference.decode`, but every row reads exactly its own survivors, once.

    Rows are dense prefixes before and after: a loser's slot goes to the row's last token, so
    uneven rows cost neither masked reads nor a consolidation.
    """
    query, key, value, number, active, extra = new
    B, Hq = query.shape[:2]
    rules = votes or Votes(NOBODY.expand(B, 0), NOBODY.expand(B, 0), 0.0)
    also_drop = packed(table, also_drop)
    S = table.width
    table.reserve(S + 1)
    made = workspace(table)
    if (key.shape, value.shape, rules.key_int.shape) != made.shapes or extra or table.extra:
        keys_int, tokens = rules.key_int[:, None], number[:, None]
        columns = {"keys": key, "values": value, "key_int": keys_int, "token": tokens}
        table.check({**columns, **extra})
    on = made.everybody if active is None else array(active)
    f32, stored = torch.float32, table.keys.dtype
    dropped = torch.empty(B, S, dtype=torch.int64)
    p = torch.empty(B, Hq, S + 1) if weights else None
    output = torch.empty(B, Hq, 1, value.shape[-1])
    small = S * key.element_size() * (key.numel() + value.numel()) <= ONE_THREAD
    use_threads(1 if small else None)
    width = step(
        array(query, f32), array(key, stored), array(value, stored),
        array(rules.query_int, f32), array(rules.key_int, f32), array(number, torch.int64), on,
        made.nobody if also_drop is None else array(also_drop),
        float(rules.beta), rules.threshold, rules.protect_first, rules.protect_recent,
        float(form.scaling), float(form.softcap or 0.0), made.key_int, made.token, made.valid,
        made.keys, made.values, made.kept, made.moves, dropped.numpy(),
        made.no_weights if p is None else p.numpy(), output.numpy(),
    )  # fmt: skip
    for name, x in extra.items():
        follow(table.columns[name], x, *map(torch.from_numpy, (on, made.kept, made.moves)))
    table.width = table.longest = width
    table.consolidate()
    output = output if query.dtype is f32 else output.to(query.dtype)
    return Decoded(output, dropped, None if p is None else p[..., :width])


def packed(table: Table, mask: Tensor | None) -> Tensor | None:
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


def follow(column: Tensor, new: Tensor, active: Tensor, kept: Tensor, moves: Tensor) -> None:
    """An extra column goes where its tokens went."""
    moving = (moves[:, :, 0] >= 0).cumprod(1).bool()  # (B, S + 1), up to the first −1
    rows = moving.nonzero()[:, 0]
    source, slot = moves[moving].unbind(1)
    column[rows, slot] = column[rows, source]
    rows = active.nonzero()[:, 0]
    column[rows, kept[rows]] = new[rows, 0]
