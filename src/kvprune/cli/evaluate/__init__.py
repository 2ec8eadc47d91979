"""kvprune eval: one command per question."""

from __future__ import annotations

import typer

from kvprune.cli.evaluate.compare import compare
from kvprune.cli.evaluate.cost import cost
from kvprune.cli.evaluate.perplexity import perplexity
from kvprune.cli.evaluate.recall import recall
from kvprune.cli.evaluate.sizing import sizing
from kvprune.cli.evaluate.throughput import throughput
from kvprune.cli.evaluate.zeroshot import lm_eval, zeroshot

eval_app = typer.Typer(
    help="Measure a model: perplexity, zero-shot tasks, recall, cost, speed; compare; plan.",
    no_args_is_help=True,
)
eval_app.command()(perplexity)
eval_app.command()(zeroshot)
eval_app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    add_help_option=False,
)(lm_eval)
eval_app.command()(recall)
eval_app.command()(cost)
eval_app.command()(sizing)
eval_app.command()(throughput)
eval_app.command()(compare)
