"""kvprune eval: one question a command."""

from __future__ import annotations

import typer

from kvprune.cli.evaluate.compare import compare
from kvprune.cli.evaluate.cost import cost
from kvprune.cli.evaluate.throughput import throughput

eval_app = typer.Typer(
    help="Measure a model: perplexity, zero-shot tasks, cost, throughput, and all side by side.",
    no_args_is_help=True,
)
eval_app.command()(cost)
eval_app.command()(throughput)
eval_app.command()(compare)
