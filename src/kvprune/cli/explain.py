"""kvprune explain: see which tokens a model drops, when, and which token dropped them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.cli.generation import Threshold
from kvprune.cli.names import AdapterName, ModelName
from kvprune.cli.piped import piped_text
from kvprune.errors import PruneError
from kvprune.utils.processes import refuse_many
from kvprune.utils.quiet import quiet

if TYPE_CHECKING:
    from kvprune.explain import Trace
    from kvprune.integration.handle import Pruned


def explain(
    model: ModelName,
    text: Annotated[
        str | None,
        typer.Argument(help="Text to read; stdin, without its last newline, if - or omitted."),
    ] = None,
    adapter: AdapterName = None,
    write: Annotated[int, typer.Option(help="Tokens to generate after the text.", min=0)] = 0,
    sample: Annotated[bool, typer.Option(help="Sample tokens instead of greedy decoding.")] = False,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    out: Annotated[Path, typer.Option(help="HTML page to write.")] = Path("explain.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    threshold: Threshold = None,
    against: Annotated[
        str | None,
        typer.Option(help="A second model, or with --adapter a second adapter, beside the first."),
    ] = None,
    against_threshold: Annotated[
        float | None, typer.Option(help="Threshold of the second; alone: of the same model again.")
    ] = None,
    cost: Annotated[
        bool, typer.Option(help="Measure the loss of each token: three more readings.")
    ] = True,
    misses: Annotated[
        int,
        typer.Option(
            help="Worst tokens for which dropped ones are brought back; some seconds each.", min=0
        ),
    ] = 5,
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
    """Write a page to explore what each layer drops from a text, why, and what it costs.

    With --against or --against-threshold: two models, or one at two thresholds, side by side.
    With --corpus: collect statistics over many texts and draw the paper's figures.
    """
    if corpus:
        _study_corpus(model, adapter, corpus, rows, length, switch, figures, as_json)
        return
    refuse_many("kvprune explain of one text")
    prompt = piped_text() if text in (None, "-") else str(text)
    if not prompt:
        raise PruneError("the text is empty; give the model something to read")

    import torch

    from kvprune.adapters.load import load_with_tokenizer
    from kvprune.explain.against import read_again
    from kvprune.explain.prompt import trace_prompt

    quiet()
    # LoRA stays apart: without it the weights are those of the dense model
    loaded = load_with_tokenizer(model, adapter)
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    _set_threshold(pruned, model, threshold)
    torch.manual_seed(seed)
    _say(f"reading with {pruned.name or model}")
    trace = trace_prompt(pruned, tokenizer, prompt, write, do_sample=sample)
    trace = _with_cost(trace, cost, misses)
    other = None
    if against is not None or against_threshold is not None:
        if against is not None:
            # another adapter of the same model, if that was how the first was given
            loaded = load_with_tokenizer(*((model, against) if adapter else (against,)))
            pruned, tokenizer = loaded.attached(), loaded.tokenizer
        _set_threshold(pruned, against or model, against_threshold)
        _say(f"reading with {pruned.name or against or model}")
        other = _with_cost(read_again(trace, pruned, tokenizer), cost, misses)
    _say("writing the page")
    files = {"page": trace.to_html(out, title, other)}
    if save is not None:
        files["trace"] = trace.save(save)
    if animate is not None:
        from kvprune.explain.animation import animate as write_animation

        files["animation"] = write_animation(trace, animate, layer)
    _print_summary(trace, other, files, as_json)


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _set_threshold(pruned: Pruned, name: str, threshold: float | None) -> None:
    if threshold is None:
        return
    if "threshold" not in pruned.working.adjustable:
        raise PruneError(f"{name} has no threshold: {pruned.working.method} does not vote")
    pruned.adjust(threshold=threshold)


def _with_cost(trace: Trace, cost: bool, misses: int) -> Trace:
    """The losses, and the worst tokens; a single token has none."""
    if not cost or len(trace.tokens) < 2:
        return trace
    _say(f"measuring the loss of {len(trace.tokens):,} tokens")
    trace = trace.with_cost()
    return trace.with_misses(misses, progress=True) if misses else trace


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
    from kvprune.evaluate.dense import identity
    from kvprune.explain import figures
    from kvprune.explain.context_switch import TEXTS
    from kvprune.explain.corpus_study import study_corpus
    from kvprune.utils.processes import launched

    quiet()
    with launched() as group:
        texts = tuple(_read_text(file) for file in switch) if switch else TEXTS
        loaded = group.together(lambda: load_with_tokenizer(model, adapter, merge=True))
        pruned, tokenizer = loaded.attached(), loaded.tokenizer
        group.agree(lambda: {"weights": identity(loaded.host)})
        study = study_corpus(pruned, tokenizer, corpus, length, rows, texts, group)
    if not group.is_main:
        return
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
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise PruneError(f"cannot read {file}: {error}; give a file of plain text") from error


def _print_summary(
    trace: Trace, other: Trace | None, files: dict[str, Path], as_json: bool
) -> None:
    from kvprune.explain.summary import summary

    about: dict[str, Any] = summary(trace)
    if as_json:
        if other is not None:
            about["against"] = summary(other)
        print(json.dumps({**about, **{name: str(file) for name, file in files.items()}}))
        return
    for file in files.values():
        print(file)
    _say(_line(about))
    if other is not None:
        _say(_line(summary(other)))
    if not about["sparsity"]:
        _say("nothing was dropped; was this model trained to prune?")


def _line(about: dict[str, Any]) -> str:
    name = about["adapter"] or about["model"]
    dropped = (
        f"{about['tokens']} tokens; {about['sparsity']:.0%} of the earlier tokens are dropped at "
        f"the end, {about['sparsity_over_pairs']:.0%} over all pairs"
    )
    cost = ""
    if "loss" in about:
        cost = f"; loss {about['loss']:.3f}, dense {about['dense_loss']:.3f}"
    return f"{name}: {dropped}{cost}" if name else f"{dropped}{cost}"
