"""Complete prompts and report the size of the cache: the library behind `kvprune generate`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.errors import PruneError
from kvprune.integration.host import max_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Completion:
    """A batch of completions, with their speed and cache size."""

    texts: list[str]
    new_tokens: int
    seconds: float
    tokens_per_second: float
    kept_share: float  # tokens held / tokens seen, mean over layers and rows
    cache_bytes: int
    dense_bytes: int


def complete(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    max_new_tokens: int = 100,
    on_text: Callable[[str], None] | None = None,
    **options: Any,
) -> Completion:
    """Continue the prompts as one batch; `on_text` streams the text of a single one."""
    if not prompts:
        raise PruneError("there is no prompt; pass at least one line of text")
    for number, prompt in enumerate(prompts):
        if not prompt.strip():
            raise PruneError(f"prompt {number} is empty; write some text for the model to continue")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    length = inputs["input_ids"].shape[1]
    limit = max_positions(model)
    if limit is not None and length + max_new_tokens > limit:
        raise PruneError(
            f"the prompt has {length} tokens and {max_new_tokens} are to come, but the model has "
            f"{limit} positions; shorten the prompt or lower --max-new-tokens"
        )
    streamer = _streamer(tokenizer, on_text) if on_text and len(prompts) == 1 else None
    inputs = inputs.to(model.device)
    start = time.perf_counter()
    out: Any = model.generate(  # type: ignore[operator]
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"],
        max_new_tokens=max_new_tokens, streamer=streamer, return_dict_in_generate=True,
        pad_token_id=tokenizer.pad_token_id, **options,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    cache, new = out.past_key_values, out.sequences[:, length:]
    assert isinstance(cache, PrunedCache)
    tokens = int((new != tokenizer.pad_token_id).sum())
    return Completion(
        texts=tokenizer.batch_decode(new, skip_special_tokens=True),
        new_tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        kept_share=float(cache.kept.float().mean()) / cache.seen,
        cache_bytes=cache.nbytes,
        dense_bytes=cache.dense_nbytes,
    )


def _streamer(tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> Any:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            on_text(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
