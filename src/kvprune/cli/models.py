"""kvprune models: the models that have names, and their measurements."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated

import typer


def models(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the models of the package by name: its adapters and their bases."""
    from kvprune.adapters.bases import BASES, DENSE
    from kvprune.adapters.registry import entries
    from kvprune.cli.evaluate.common import table

    adapters = entries()
    if as_json:
        listed = [
            {"name": e.name, **asdict(e.about), "bytes": e.size, "licence": e.base.licence}
            for e in adapters
        ]
        bases = [
            {"name": base.name, "hub": base.hub, "wheel": str(base.wheel), "licence": base.licence}
            for base in BASES.values()
        ]
        print(json.dumps({"adapters": listed, "bases": bases}))
        return
    rows = [
        [
            e.name, e.base.name, f"{e.about.strength:.0%}", f"{e.about.sparsity:.1%}",
            f"{e.about.perplexity_ratio:.3f} ×", f"{e.size / 1e6:.1f} MB", e.base.licence,
        ]
        for e in adapters
    ] + [
        [base.name + DENSE, base.name, "", "0.0%", "1.000 ×", "", base.licence]
        for base in BASES.values()
    ]  # fmt: skip
    names = ["name", "base", "strength", "pruned at 1,024", "perplexity", "size", "licence"]
    table("Pruned models and their dense bases", names, rows, left=2)
    for entry in adapters:
        if entry.about.default:
            print(f"{entry.base.name} alone means {entry.name}", file=sys.stderr)
    if not adapters:
        base = next(iter(BASES))
        print(
            f"no adapter is installed with this kvprune; kvprune train {base} --tune lora makes "
            f"one, which --adapter takes",
            file=sys.stderr,
        )
