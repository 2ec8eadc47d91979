"""The trace of a prompt, with or without the tokens that the model generates after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvprune.errors import PruneError
from kvprune.explain.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvprune.integration.handle import Pruned


def trace_prompt(
    pruned: Pruned, tokenizer: PreTrainedTokenizerBase, text: str, write: int = 0, **options: Any
) -> Trace:
    """The trace of a text and of `write` more tokens that the model generates after it.

    options: arguments of `generate`.
    """
    if not write:
        return Trace.from_text(pruned, tokenizer, text)
    import torch

    from kvprune.cache.pruned_cache import PrunedCache
    from kvprune.integration.host import max_positions

    if not text.strip():
        raise PruneError("the text is empty; give the model a prompt to continue")
    ids = tokenizer(text, return_tensors="pt").input_ids.to(pruned.model.device)
    limit = max_positions(pruned.model)
    if limit is not None and ids.shape[1] + write > limit:
        raise PruneError(
            f"the text has {ids.shape[1]} tokens and {write} are to be generated, but the model "
            f"has {limit} positions; shorten the text or generate fewer"
        )
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    out: Any = pruned.model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=write, pad_token_id=pad,
        past_key_values=PrunedCache(pruned, record=True), return_dict_in_generate=True, **options,
    )  # fmt: skip
    return Trace.from_generate(out, tokenizer, ids, pruned=pruned)[0]
