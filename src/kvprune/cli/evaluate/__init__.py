"""kvprune eval: one question a command."""

from __future__ import annotations

import typer

from kvprune.cli.evaluate.cost import cost

eval_app = typer.Typer(
    help="Measure a model: perplexity, zero-shot tasks, cost, throughput, and all side by side.",
    no_args_is_help=True,
)
eval_app.command()(cost)
