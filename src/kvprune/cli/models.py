"""kvprune models: the models that have names, their measurements, and what is here of them."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvprune.adapters.bases import Base
    from kvprune.adapters.local import Local
    from kvprune.adapters.registry import Entry


TINY_LICENCE = "Apache-2.0"  # that of the package


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models with names, how much they prune, and which weights are here already."""
    from kvprune.adapters.bases import BASES
    from kvprune.adapters.local import copies
    from kvprune.adapters.registry import entries

    adapters, here = entries(), {base: copies(base) for base in BASES.values()}
    if as_json:
        print(json.dumps(_document(adapters, here)))
    else:
        _show(adapters, here)


def _document(adapters: list[Entry], here: dict[Base, list[Local]]) -> dict[str, Any]:
    from kvprune import tiny
    from kvprune.adapters.local import tiny_copy

    listed = [
        {"name": e.name, **asdict(e.about), "bytes": e.size, "licence": e.base.licence}
        for e in adapters
    ]
    bases = [
        {
            "name": base.name, "hub": base.hub, "wheel": str(base.wheel), "licence": base.licence,
            "here": [_plain(copy) for copy in found],
        }
        for base, found in here.items()
    ]  # fmt: skip
    small = {"name": tiny.NAME, "hub": None, "wheel": None, "licence": TINY_LICENCE,
             "here": [_plain(tiny_copy())]}  # fmt: skip
    return {"adapters": listed, "bases": [*bases, small]}


def _show(adapters: list[Entry], here: dict[Base, list[Local]]) -> None:
    from kvprune import tiny
    from kvprune.adapters.bases import DENSE
    from kvprune.adapters.local import tiny_copy
    from kvprune.cli.evaluate.common import table

    rows = []
    for base, found in here.items():
        where = ", ".join(f"from the {copy.source}" for copy in found)
        size = _size(found[0].bytes) if found else ""
        adapter = "in the package" if found else "base: not yet"
        rows += [
            [e.name, adapter, _size(e.size), f"{e.about.sparsity:.0%}",
             f"{e.about.perplexity_ratio:.3f} ×"]
            for e in adapters if e.base == base
        ]  # fmt: skip
        rows.append([base.name + DENSE, where or "not yet", size, "0%", "1.000 ×"])
    rows.append([tiny.NAME, "in the package", _size(tiny_copy().bytes), "0%", "1.000 ×"])
    columns = ["name", "weights here", "size", "pruned", "perplexity"]
    table("Models by name", columns, rows, left=2)
    _explain(adapters, here)


def _explain(adapters: list[Entry], here: dict[Base, list[Local]]) -> None:
    from kvprune.adapters.bases import BASES

    lines = ["pruned: of 1,024 tokens; perplexity: / that of the model without pruning"]
    for base, found in here.items():
        lines.append(f"{base.name}-dense is {base.hub}, {base.licence}")
        if not found:
            lines.append(f"  fetched at its first use, from the hub or as {base.wheel} of PyPI")
    lines += [
        f"{entry.base.name} alone means {entry.name}" for entry in adapters if entry.about.default
    ]
    if not adapters:
        lines.append(
            f"no adapter is installed with this kvprune; kvprune train {next(iter(BASES))} "
            f"--tune lora makes one, which --adapter takes"
        )
    for line in lines:
        print(line, file=sys.stderr)


def _plain(copy: Local) -> dict[str, Any]:
    return {**asdict(copy), "folder": str(copy.folder)}


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"
