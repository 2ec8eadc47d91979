"""Complete prompts and report the size of the cache: the library behind `kvprune generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprune.cache.nbytes import nbytes
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.chat import saved
from kvprune.chat.caches import Caches
from kvprune.chat.template import Template, end_tokens
from kvprune.errors import PruneError
from kvprune.integration.host import max_positions
from kvprune.integration.unwrap import unwrap
from kvprune.utils.checks import check_prompts

if TYPE_CHECKING:
    from transformers import CompileConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.cache_utils import Cache

    from kvprune.cache.snapshot import Snapshot
    from kvprune.integration.handle import Pruned


@dataclass(frozen=True)
class Completion:
    """A batch of completions, with their speed and cache size."""

    texts: list[str]
    new_tokens: int  # of all rows, each up to its end
    seconds: float
    tokens_per_second: float
    # tokens held / tokens read, over all layers and rows: of each row its real tokens up to its
    # end, neither pads before nor those that fill it up while others go on
    kept_share: float
    cache_bytes: int
    dense_bytes: int  # of a DynamicCache for the same batch, whose rows are padded


def compiling() -> CompileConfig:
    """For `complete(compile_config=...)`: decode steps of any length in one graph."""
    from transformers import CompileConfig

    return CompileConfig(fullgraph=True, dynamic=True, mode="default")


def complete(
    model: PreTrainedModel | Pruned,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int = 100,
    on_text: Callable[[str], None] | None = None,
    *,
    as_chat: bool = False,
    system: str = "",
    prefix: str | Path | None = None,
    kv: str | None = None,
    budget: int | str | None = None,
    **options: Any,
) -> Completion:
    """Continue the prompts as one batch; `on_text` streams the text of a single one.

    `as_chat`: each prompt is the message of a user, and the answer is generated; `system` is the
    system message. `prefix`: a file that `save_prefix` wrote, after which every prompt comes. `kv`
    and `budget` are those of `PrunedCache`; a dense model uses the cache of transformers.
    """
    check_prompts(prompts)
    host, pruned = unwrap(model)
    caches = Caches(host, pruned, kv=kv, budget=budget)
    if prefix is not None and (as_chat or system):
        raise PruneError(
            "a prefix is followed by plain text, not by the messages of a chat; leave out --chat, "
            "--system and --template, or go on with a conversation: kvprune chat --resume"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    written = _as_chat(tokenizer, prompts, system) if as_chat or system else prompts
    inputs = tokenizer(
        written, return_tensors="pt", padding=True, padding_side="left",
        add_special_tokens=written is prompts and prefix is None,
    )  # fmt: skip
    cache: Cache | None = None if pruned is None else caches.new()
    if prefix is not None:
        cache = _put_before(inputs, prefix, caches)
    length = inputs["input_ids"].shape[1]
    limit = max_positions(host)
    if limit is not None and length + max_new_tokens > limit:
        raise PruneError(
            f"the prompt has {length} tokens and {max_new_tokens} are to come, but the model has "
            f"{limit} positions; shorten the prompt or lower --max-new-tokens"
        )
    streamer = _streamer(tokenizer, on_text) if on_text and len(prompts) == 1 else None
    inputs, ends = inputs.to(host.device), end_tokens(host, tokenizer)
    start = time.perf_counter()
    out: Any = host.generate(  # type: ignore[operator]
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        past_key_values=cache,
        max_new_tokens=max_new_tokens, streamer=streamer, return_dict_in_generate=True,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=sorted(ends) or None, **options,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    cache, new = out.past_key_values, out.sequences[:, length:]
    counts = _counts(new, ends)
    total = int(counts.sum())
    return Completion(
        texts=[
            str(tokenizer.decode(row[:count], skip_special_tokens=True))
            for row, count in zip(new, counts.tolist(), strict=True)
        ],
        new_tokens=total,
        seconds=seconds,
        tokens_per_second=total / seconds,
        # the last token of a row is generated and not read
        kept_share=_kept_share(cache, inputs["attention_mask"].sum(1) + counts - 1),
        cache_bytes=nbytes(cache),
        dense_bytes=cache.dense_nbytes if isinstance(cache, PrunedCache) else nbytes(cache),
    )


@torch.no_grad()
def save_prefix(
    model: PreTrainedModel | Pruned,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    file: str | Path,
    *,
    prefix: str | Path | None = None,
    kv: str | None = None,
    budget: int | str | None = None,
) -> Snapshot:
    """Read a text, after another prefix if there is one, and save what the cache holds of it."""
    check_prompts([text])
    host, pruned = unwrap(model)
    caches = Caches(host, pruned, kv=kv, budget=budget)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=prefix is None)
    cache = caches.new() if prefix is None else _put_before(inputs, prefix, caches)
    ids, seen = inputs["input_ids"], cache.get_seq_length()
    limit = max_positions(host)
    if limit is not None and ids.shape[1] > limit:
        raise PruneError(
            f"the prefix has {ids.shape[1]} tokens, but the model has {limit} positions; shorten it"
        )
    # the body alone: nobody asks for the logits of a prefix
    host.base_model(input_ids=ids[:, seen:].to(host.device), past_key_values=cache, use_cache=True)
    snapshot = caches.snapshot(cache, {"kind": "prefix", "tokens": ids[0].tolist()})
    snapshot.save(file)
    return snapshot


def _put_before(inputs: Any, prefix: str | Path, caches: Caches) -> Cache:
    """Let the inputs begin with a prefix; returns the cache that has read it, once per row."""
    snapshot = saved.load(prefix, "prefix")
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cache = caches.restore(snapshot, rows=len(ids))
    if not bool(mask.all()) and any(cache.is_sliding):
        raise PruneError(
            "prompts of several lengths cannot follow a prefix here: the model has sliding "
            "windows, in which their pads would count; run them one by one"
        )
    tokens = torch.tensor(snapshot.notes["tokens"]).expand(len(ids), -1)
    inputs["input_ids"] = torch.cat([tokens, ids], 1)
    inputs["attention_mask"] = torch.cat([torch.ones_like(tokens), mask], 1)
    return cache


def _as_chat(tokenizer: PreTrainedTokenizerBase, prompts: list[str], system: str) -> list[str]:
    template = Template(tokenizer)
    first = [{"role": "system", "content": system}] if system else []
    return [template.prompt([*first, {"role": "user", "content": prompt}]) for prompt in prompts]


def _counts(new: Tensor, ends: set[int]) -> Tensor:
    """How many of the new tokens (B, T) are each row's own, its end included: (B,)."""
    is_end = torch.isin(new, torch.tensor(sorted(ends), dtype=new.dtype, device=new.device))
    # a row goes on up to its first end: the cumulative count before each token is 0
    return (is_end.long().cumsum(1) - is_end.long() == 0).sum(1)


def _kept_share(cache: Any, tokens: Tensor) -> float:
    """The share of each row's first `tokens` (B,) that was held when the row had read them."""
    if not isinstance(cache, PrunedCache):
        return 1.0
    step = cache.drop_step  # (L, B, T)
    read = tokens.cpu()[:, None]
    dropped = (step < read) & (torch.arange(step.shape[2]) < read)
    return 1 - int(dropped.sum()) / (len(step) * int(read.sum()))


def _streamer(tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
