"""kvprune generate: continue a prompt with a pruned cache."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvprune.adapters.ready import load_ready
from kvprune.cli import generation
from kvprune.cli.names import AdapterName, ModelName
from kvprune.cli.piped import piped_text
from kvprune.cli.starting import starting
from kvprune.errors import PruneError
from kvprune.utils.checks import check_prompts

if TYPE_CHECKING:
    from kvprune.cache.snapshot import Snapshot


def generate(
    model: ModelName,
    prompt: Annotated[
        str | None,
        typer.Argument(help="To continue; stdin, without its last newline, if - or omitted."),
    ] = None,
    adapter: AdapterName = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="A file, one prompt per line, run as one batch; blank lines are skipped."
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Answer each prompt as a message, with the model's chat template; --system and "
            "--template imply it.",
        ),
    ] = False,
    system: generation.System = "",
    max_new_tokens: Annotated[int, typer.Option(help="Maximum tokens to generate.", min=1)] = 100,
    sample: Annotated[bool, typer.Option(help="The same as --temperature 1.")] = False,
    temperature: generation.Temperature = 0.0,
    top_p: generation.TopP = 0.9,
    seed: generation.Seed = 0,
    threshold: generation.Threshold = None,
    protect_first: generation.ProtectFirst = None,
    protect_recent: generation.ProtectRecent = None,
    template: generation.TemplateFile = None,
    prefix: Annotated[
        Path | None,
        typer.Option(
            help="A file that --save-prefix wrote: the prompts continue it, and it is not read "
            "again.",
            callback=generation.check_file,
        ),
    ] = None,
    save_prefix: Annotated[
        Path | None,
        typer.Option(
            help="Read the prompt, save the cache to this file, and generate nothing.",
            callback=generation.check_folder,
        ),
    ] = None,
    kv: generation.Kv = None,
    kv_budget: generation.KvBudget = None,
    dtype: generation.Dtype = "auto",
    device: generation.Device = None,
    compile_model: generation.Compile = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Continue a prompt, and report how much of the context the cache still holds."""
    texts = _prompts(prompt, prompts)
    as_chat = chat or template is not None
    if save_prefix is not None and (as_chat or system or prompts is not None):
        raise PruneError("--save-prefix reads one plain text, neither --prompts nor a chat")
    temperature = temperature or float(sample)
    options: dict[str, Any] = {"do_sample": bool(temperature)}
    if temperature:
        # of what a model's own settings may restrict sampling by, only what is asked for here
        options |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    with starting() as tell:
        loaded = load_ready(
            model, adapter, dtype, device, template, tell, kv,
            threshold=threshold, protect_first=protect_first, protect_recent=protect_recent,
        )  # fmt: skip

    import torch

    from kvprune.chat import completion

    storage: Any = {"prefix": prefix, "kv": kv, "budget": kv_budget}
    if save_prefix is not None:
        saved = completion.save_prefix(
            loaded.model, loaded.tokenizer, texts[0], save_prefix, **storage
        )
        _report_prefix(save_prefix, saved, as_json)
        return
    if generation.can_compile(loaded, compile_model):
        from kvprune.chat.completion import compiling

        options["compile_config"] = compiling()
        with starting() as tell:
            # its time is not that of the answer: two tokens, the second by the compiled model
            tell("compiling the model")
            completion.complete(
                loaded.model, loaded.tokenizer, texts, 2, as_chat=as_chat, system=system,
                **storage, **options,
            )  # fmt: skip
    torch.manual_seed(seed)
    stream = None if as_json or len(texts) > 1 else _write
    result = completion.complete(
        loaded.model, loaded.tokenizer, texts, max_new_tokens, stream,
        as_chat=as_chat, system=system, **storage, **options,
    )  # fmt: skip
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
        f"{result.kept_share:.0%} of the context; "
        f"{generation.sizes(result.cache_bytes, result.dense_bytes)}",
        file=sys.stderr,
    )


def _report_prefix(file: Path, saved: Snapshot, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"file": str(file), "tokens": saved.tokens, "bytes": saved.nbytes}))
        return
    size = f"{saved.nbytes / 2**20:.2f} MiB"
    print(f"wrote {file}: {saved.tokens:,} tokens, {size} of cache", file=sys.stderr)


def _prompts(prompt: str | None, file: Path | None) -> list[str]:
    """The prompts, refused here if they are empty: a model takes seconds to load."""
    if file is None:
        texts = [piped_text() if prompt in (None, "-") else str(prompt)]
    elif prompt is not None:
        raise PruneError("a prompt and --prompts were both given; use one of them")
    else:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise PruneError(f"cannot read prompts from {file}: {error}") from error
        texts = [line for line in lines if line.strip()]
        if not texts:
            raise PruneError(f"{file} holds no prompt; write one per line")
    check_prompts(texts)
    return texts


def _write(text: str) -> None:
    print(text, end="", flush=True)
