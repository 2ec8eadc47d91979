"""Vote, drop, attend and insert for one new token a row: a plain version and its kernels."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kvprune.cache.slots import SlotTable
from kvprune.errors import PruneError
from kvprune.ops.decode import cpu, reference
from kvprune.ops.decode.reference import Decoded, Votes

IMPLEMENTATIONS = {"reference": reference.decode, "cpu": cpu.decode}

__all__ = ["Decoded", "Votes", "available", "best_backend", "decode"]


def available(exclude: str | None = None) -> list[str]:
    return [name for name in IMPLEMENTATIONS if name != exclude]


def best_backend(table: SlotTable) -> str:
    fits = table.keys.device.type == "cpu" and table.keys.dtype in cpu.DTYPES
    return "cpu" if fits else "reference"


def decode(
    table: SlotTable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    token: Tensor,
    *,
    backend: str | None = None,
    **options: Any,
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
    also_drop = options.get("also_drop")
    if also_drop is not None and also_drop.shape != (table.rows, table.width):
        raise PruneError(
            f"also_drop has the shape {tuple(also_drop.shape)}; it must be that of the table's "
            f"slots before the step, {(table.rows, table.width)}"
        )
    if query.shape[1] % key.shape[1]:
        raise PruneError(
            f"{query.shape[1]} query heads cannot share {key.shape[1]} key heads evenly; "
            f"check num_key_value_heads in the model's config"
        )
    return IMPLEMENTATIONS[name](table, query, key, value, token, **options)
