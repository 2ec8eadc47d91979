"""kvprune explain: see which tokens a model drops, when, and which token dropped them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.cli.piped import piped_text
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.explain import Trace


def explain(
    model: Annotated[str, typer.Argument(help="A folder, or a name: hub or kvprune models.")],
    text: Annotated[
        str | None,
        typer.Argument(help="Text to read; stdin, without its last newline, if - or omitted."),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A folder that Pruned.save wrote.")] = None,
    write: Annotated[int, typer.Option(help="Tokens to generate after the text.", min=0)] = 0,
    sample: Annotated[bool, typer.Option(help="Sample tokens instead of greedy decoding.")] = False,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("explain.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    save: Annotated[Path | None, typer.Option(help="Also save the trace as .json or .npz.")] = None,
    animate: Annotated[Path | None, typer.Option(help="Also write an animation as .svg.")] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer of the animation; default: the one that drops most.")
    ] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(help="Statistics of files, folders or hub datasets instead; repeatable."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Rows of the corpus to read.", min=1)] = 32,
    length: Annotated[int, typer.Option(help="Tokens per row.", min=2)] = 512,
    switch: Annotated[
        list[Path] | None,
        typer.Option(help="Two or more files for the context switch; default: the paper's texts."),
    ] = None,
    figures: Annotated[Path, typer.Option(help="Folder for statistics and figures.")] = Path(
        "explain"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a page to explore what each layer drops from a text.

    With --corpus: collect statistics over many texts and draw the paper's figures.
    """
    if corpus:
        _study_corpus(model, adapter, corpus, rows, length, switch, figures, as_json)
        return
    prompt = piped_text() if text in (None, "-") else str(text)

    import torch

    from kvprune.adapters.load import load_with_tokenizer
    from kvprune.explain.prompt import trace_prompt

    quiet()
    loaded = load_with_tokenizer(model, adapter, merge=True)
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    torch.manual_seed(seed)
    trace = trace_prompt(pruned, tokenizer, prompt, write, do_sample=sample)
    files = {"page": trace.to_html(out, title)}
    if save is not None:
        files["trace"] = trace.save(save)
    if animate is not None:
        from kvprune.explain.animation import animate as write_animation

        files["animation"] = write_animation(trace, animate, layer)
    _print_summary(trace, files, as_json)


def _study_corpus(
    model: str,
    adapter: str | None,
    corpus: list[str],
    rows: int,
    length: int,
    switch: list[Path] | None,
    folder: Path,
    as_json: bool,
) -> None:
    from kvprune.adapters.load import load_with_tokenizer
    from kvprune.explain import figures
    from kvprune.explain.context_switch import TEXTS
    from kvprune.explain.corpus_study import study_corpus

    quiet()
    loaded = load_with_tokenizer(model, adapter, merge=True)
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    texts = tuple(_read_text(file) for file in switch) if switch else TEXTS
    study = study_corpus(pruned, tokenizer, corpus, length, rows, texts)
    files = [study.save(folder / "forgetting.json"), *figures.save(study, folder)]
    if as_json:
        print(json.dumps(study.to_plain()))
        return
    for file in files:
        print(file)
    for name, row in study.statistics.droppers_by_kind.items():
        share = f"{row.share:6.1%} of drops, {row.of_tokens:6.1%} of tokens"
        print(f"{name:15} {share}", file=sys.stderr)


def _read_text(file: Path) -> str:
    from kvprune.errors import PruneError

    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PruneError(f"cannot read {file}: {error}; give a file of plain text") from error


def _print_summary(trace: Trace, files: dict[str, Path], as_json: bool) -> None:
    sparsity = trace.sparsity[:, -1]
    about: dict[str, Any] = {
        "tokens": len(trace.tokens),
        "layers": list(trace.layers),
        "sparsity": float(sparsity.mean()),
        "sparsity_by_layer": sparsity.tolist(),
        **{name: str(file) for name, file in files.items()},
    }
    if as_json:
        print(json.dumps(about))
        return
    for file in files.values():
        print(file)
    line = f"{about['tokens']} tokens; {about['sparsity']:.0%} of the context is dropped at the end"
    print(line, file=sys.stderr)
    if not sparsity.any():
        print("nothing was dropped; was this model trained to prune?", file=sys.stderr)
