"""kvprune eval sizing: how many replicas a load needs, from what one was measured to do."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from kvprune.cli.evaluate.common import table
from kvprune.cli.names import ConfigName
from kvprune.errors import PruneError
from kvprune.utils.amounts import size
from kvprune.utils.parse import in_bytes
from kvprune.utils.quiet import quiet


def sizing(
    model: ConfigName,
    requests: Annotated[float, typer.Option(help="Requests per second, of all clients.")],
    read: Annotated[float, typer.Option(help="Prompt tokens/s of a replica, as measured.")],
    steps: Annotated[
        str,
        typer.Option(
            help="Seconds of a step by rows, as measured: 1=0.05,16=0.12.", metavar="ROWS=SECONDS"
        ),
    ],
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt, mean.")] = 1000,
    answer: Annotated[int, typer.Option(help="Tokens of an answer, mean.")] = 200,
    reused: Annotated[
        float, typer.Option(help="Share of the prompts' tokens found in kept prefixes.")
    ] = 0.0,
    sparsity: Annotated[float, typer.Option(help="Share of the context that is dropped.")] = 0.8,
    rank: Annotated[
        int, typer.Option(help="Width r of the interaction keys; 0: a dense model.", min=0)
    ] = 64,
    memory: Annotated[
        str, typer.Option(help="Bytes for the caches of a replica.", metavar="SIZE")
    ] = "4GB",
    max_rows: Annotated[int, typer.Option(help="Answers generated at once.", min=1)] = 64,
    use: Annotated[
        float, typer.Option(help="Share of what a replica can do that is planned for.")
    ] = 0.7,
    dtype: Annotated[str, typer.Option(help="Of keys and values; auto: as the model.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Plan the replicas for a load; python benchmarks/sizing.py measures what one can do."""
    budget, by_rows = in_bytes(memory, "--memory"), _steps(steps)

    from kvprune.evaluate.cost.shape import read_shape
    from kvprune.evaluate.cost.sizing import Load, Replica, plan, row_bytes

    quiet()
    load = Load(requests, prompt, answer, reused)
    replica = Replica.measured(read, by_rows, budget, max_rows)
    held = row_bytes(read_shape(model, dtype), load, sparsity, rank or None)
    planned = plan(load, replica, held, use)
    if as_json:
        print(json.dumps({"load": asdict(load), "replica": asdict(replica), **asdict(planned)}))
        return
    lines = [
        ["replicas", f"{planned.replicas:,}"],
        ["rows that fit into one", f"{planned.rows:,}, {size(planned.row_bytes)} each"],
        ["requests/s that one can do", f"{planned.most_requests:.3g}"],
        ["requests/s of one at this load", f"{planned.requests:.3g}"],
        ["rows of one at this load", f"{planned.running:.1f}, {size(planned.used_bytes)}"],
        ["requests that find all rows taken", f"{planned.waits:.1%}"],
        [
            "tokens/s of one",
            f"{planned.tokens_read:,.0f} read, {planned.tokens_written:,.0f} written",
        ],
        ["between two tokens", f"{1000 * planned.token_seconds:,.0f} ms"],
        ["a whole request", f"{planned.request_seconds:,.1f} s"],
    ]
    title = f"{model}: {requests:g} requests/s of {prompt:,} + {answer:,} tokens"
    table(title, ["", "mean"], lines)


def _steps(text: str) -> dict[int, float]:
    try:
        pairs = [part.split("=") for part in text.split(",")]
        return {int(rows): float(seconds) for rows, seconds in pairs}
    except ValueError:
        raise PruneError(
            f"--steps {text!r} must be seconds by number of rows, such as 1=0.05,16=0.12"
        ) from None
