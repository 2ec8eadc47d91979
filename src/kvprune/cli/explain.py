"""kvprune explain: see what a model forgets, when, and because of which token."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.cli.quiet import quiet

if TYPE_CHECKING:
    from kvprune.explain import Trace


def explain(
    model: Annotated[str, typer.Argument(help="A folder, or a name: hub or kvprune models.")],
    text: Annotated[str | None, typer.Argument(help="To read; - or none: stdin.")] = None,
    adapter: Annotated[str | None, typer.Option(help="What Pruned.save wrote, or dense.")] = None,
    write: Annotated[int, typer.Option(help="So many tokens the model goes on with.", min=0)] = 0,
    sample: Annotated[bool, typer.Option(help="Draw tokens instead of taking the best.")] = False,
    seed: Annotated[int, typer.Option(help="Of drawing.")] = 0,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("explain.html"),
    title: Annotated[str, typer.Option(help="Of the page.")] = "",
    save: Annotated[Path | None, typer.Option(help="Keep the trace as .json or .npz.")] = None,
    animate: Annotated[Path | None, typer.Option(help="A moving picture as .svg.")] = None,
    layer: Annotated[
        int | None, typer.Option(help="That the picture shows; else the one that drops most.")
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Count over texts instead: files, folders, hub datasets; repeatable."),
    ] = None,
    rows: Annotated[int, typer.Option(help="So many pieces of the corpus.", min=1)] = 32,
    length: Annotated[int, typer.Option(help="Tokens of a piece.", min=2)] = 512,
    switch: Annotated[
        list[Path] | None,
        typer.Option(help="Files of the context switch, two or more; else the paper's texts."),
    ] = None,
    figures: Annotated[Path, typer.Option(help="The folder of the counts and figures.")] = Path(
        "explain"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a page on which to explore what each layer forgot of a text.

    With --corpus: count over many texts what is forgotten, and draw the paper's figures.
    """
    if corpus:
        _study(model, adapter, corpus, rows, length, switch, figures, as_json)
        return
    given = sys.stdin.read() if text in (None, "-") else str(text)

    import torch

    from kvprune.adapters.loading import load
    from kvprune.explain.read import trace

    quiet()
    loaded = load(model, adapter, merge=True)
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    torch.manual_seed(seed)
    made = trace(pruned, tokenizer, given, write, do_sample=sample)
    files = {"page": made.to_html(out, title)}
    if save is not None:
        files["trace"] = made.save(save)
    if animate is not None:
        from kvprune.explain.animation import animate as write_animation

        files["animation"] = write_animation(made, animate, layer)
    _show(made, files, as_json)


def _study(
    model: str,
    adapter: str | None,
    corpus: list[str],
    rows: int,
    length: int,
    switch: list[Path] | None,
    folder: Path,
    as_json: bool,
) -> None:
    from kvprune.adapters.loading import load
    from kvprune.explain import figures
    from kvprune.explain.study import study
    from kvprune.explain.switch import TEXTS

    quiet()
    loaded = load(model, adapter, merge=True)
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    texts = tuple(_read(file) for file in switch) if switch else TEXTS
    made = study(pruned, tokenizer, corpus, length, rows, texts)
    files = [made.save(folder / "forgetting.json"), *figures.save(made, folder)]
    if as_json:
        print(json.dumps(made.to_plain()))
        return
    for file in files:
        print(file)
    for name, row in made.statistics.droppers_by_kind.items():
        share = f"{row.share:6.1%} of drops, {row.of_tokens:6.1%} of tokens"
        print(f"{name:15} {share}", file=sys.stderr)


def _read(file: Path) -> str:
    from kvprune.errors import PruneError

    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PruneError(f"cannot read {file}: {error}; give a file of plain text") from error


def _show(made: Trace, files: dict[str, Path], as_json: bool) -> None:
    sparsity = made.sparsity[:, -1]
    about: dict[str, Any] = {
        "tokens": len(made.tokens),
        "layers": list(made.layers),
        "sparsity": float(sparsity.mean()),
        "sparsity_by_layer": sparsity.tolist(),
        **{name: str(file) for name, file in files.items()},
    }
    if as_json:
        print(json.dumps(about))
        return
    for file in files.values():
        print(file)
    gone = f"{about['tokens']} tokens; {about['sparsity']:.0%} of the context is gone at the end"
    print(gone, file=sys.stderr)
    if not sparsity.any():
        print("nothing was dropped: is this model trained to prune?", file=sys.stderr)
