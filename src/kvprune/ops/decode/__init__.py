"""Vote, drop, attend and insert for one new token a row: a plain version and its kernels."""

from __future__ import annotations

from torch import Tensor

from kvprune.errors import PruneError
from kvprune.ops.decode import cpu, reference
from kvprune.ops.decode.reference import Decoded, NewToken, Votes
from kvprune.ops.decode.table import Table
from kvprune.ops.form import AttentionForm

IMPLEMENTATIONS = {"reference": reference.decode, "cpu": cpu.decode}

__all__ = ["Decoded", "NewToken", "Votes", "available", "best_backend", "decode"]


def available(exclude: str | None = None) -> list[str]:
    return [name for name in IMPLEMENTATIONS if name != exclude]


def best_backend(table: Table) -> str:
    fits = table.keys.device.type == "cpu" and table.keys.dtype in cpu.DTYPES
    return "cpu" if fits else "reference"


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
    name = backend or best_backend(table)
    if name not in IMPLEMENTATIONS:
        raise PruneError(f"no decode backend is called {name!r}; choose one of {available()}")
    if name == "cpu" and best_backend(table) != "cpu":
        raise PruneError(
            f"the cpu backend cannot read {table.keys.dtype} on {table.keys.device}; "
            f"use 'reference', or a table on the cpu in one of {list(cpu.DTYPES)}"
        )
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
            "the decode step knows no attention sinks; use hard_attention over the table's slots"
        )
    implementation = IMPLEMENTATIONS[name]
    return implementation(table, new, form, votes=votes, also_drop=also_drop, weights=weights)
