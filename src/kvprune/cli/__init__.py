"""The command line: one thin file per command; heavy imports only where they are needed."""

from __future__ import annotations

import sys

import typer

from kvprune.cli.chat import chat
from kvprune.cli.demo import demo
from kvprune.cli.doctor import doctor
from kvprune.cli.evaluate import eval_app
from kvprune.cli.explain import explain
from kvprune.cli.generate import generate
from kvprune.cli.models import models
from kvprune.cli.serve import serve
from kvprune.cli.train import train
from kvprune.errors import PruneError
from kvprune.version import __version__

app = typer.Typer(
    help="Teach a causal language model to forget the tokens that it no longer needs.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command()(chat)
app.command()(models)
app.command()(doctor)
app.command()(generate)
app.command()(serve)
app.command()(explain)
app.command()(train)
app.add_typer(eval_app, name="eval")


def _version(show: bool) -> None:
    if show:
        print(f"kvprune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    pass


def main() -> None:
    """Run a command; a PruneError is printed as one line on stderr, with exit code 2."""
    try:
        app()
    except PruneError as error:
        print(f"kvprune: {error}", file=sys.stderr)
        sys.exit(2)
