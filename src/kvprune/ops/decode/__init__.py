"""Vote, drop, attend and insert for one new token per row: a plain version and its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.errors import PruneError
from kvprune.ops.decode import reference
from kvprune.ops.decode.reference import Decoded, NewToken, Votes
from kvprune.ops.decode.table import Table
from kvprune.ops.dispatch import REFERENCE, Operation
from kvprune.ops.form import AttentionForm

__all__ = ["DECODE", "REMOVE", "Decoded", "NewToken", "Votes", "decode"]

STORED = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
DECODE = Operation(reference.decode, cpu=STORED, triton=STORED)
REMOVE = Operation(reference.remove, cpu=STORED, triton=STORED)


def decode(
    table: Table,
    new: NewToken,
    form: AttentionForm,
    *,
    votes: Votes | None = None,
    also_drop: Tensor | None = None,
    weights: bool = False,
    backend: str | None = None,
) -> Decoded:
    """See `reference.decode`; `backend` names an implementation, by default the best that fits."""
    if backend is None and not table.for_kernels:
        backend = REFERENCE
    implementation = DECODE.implementation(table.stored, backend)
    if also_drop is not None and also_drop.shape != (table.rows, table.width):
        raise PruneError(
            f"also_drop has the shape {tuple(also_drop.shape)}; it must be that of the table's "
            f"slots before the step, {(table.rows, table.width)}"
        )
    heads, kv_heads = new.query.shape[1], new.key.shape[1]
    if heads % kv_heads:
        raise PruneError(
            f"{heads} query heads cannot share {kv_heads} key heads evenly; "
            f"check num_key_value_heads in the model's config"
        )
    if form.sinks is not None:
        raise PruneError(
            "the decode step has no attention sinks; use hard_attention over the table's slots"
        )
    return implementation(table, new, form, votes=votes, also_drop=also_drop, weights=weights)
