"""kvprune generate: continue a prompt with a pruned cache."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvprune.utils.quiet import quiet


def generate(
    model: Annotated[str, typer.Argument(help="A folder, or a name: hub or kvprune models.")],
    prompt: Annotated[
        str | None, typer.Argument(help="To continue; stdin if - or omitted.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A folder that Pruned.save wrote.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with one prompt per line, run as one batch.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.", min=1)] = 100,
    sample: Annotated[bool, typer.Option(help="Sample tokens instead of greedy decoding.")] = False,
    temperature: Annotated[float, typer.Option(help="Temperature for sampling.", min=1e-3)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a prompt, and report how much of the context the cache still holds."""
    texts = _prompts(prompt, prompts)

    import torch

    from kvprune.adapters.load import load_with_tokenizer
    from kvprune.chat.completion import complete

    quiet()
    loaded = load_with_tokenizer(model, adapter, merge=True)
    torch.manual_seed(seed)
    stream = None if as_json or len(texts) > 1 else _write
    options = {"do_sample": sample, **({"temperature": temperature} if sample else {})}
    result = complete(
        loaded.attached().model, loaded.tokenizer, texts, max_new_tokens, stream, **options
    )
    if as_json:
        print(json.dumps(asdict(result)))
        return
    if stream is None:
        for text in result.texts:
            print(text)
    else:
        print()
    print(
        f"{result.new_tokens} tokens, {result.tokens_per_second:.1f} tokens/s; kept "
        f"{result.kept_share:.0%} of the context; cache {result.cache_bytes / 2**20:.2f} MiB "
        f"against {result.dense_bytes / 2**20:.2f} MiB dense",
        file=sys.stderr,
    )


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    from kvprune.errors import PruneError

    if file is None:
        return [sys.stdin.read() if prompt in (None, "-") else str(prompt)]
    if prompt is not None:
        raise PruneError("a prompt and --prompts were both given; use one of them")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PruneError(f"cannot read prompts from {file}: {error}") from error
    return [line for line in lines if line.strip()]


def _write(text: str) -> None:
    print(text, end="", flush=True)
