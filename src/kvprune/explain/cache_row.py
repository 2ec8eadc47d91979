"""One row of a cache that recorded its drops, as the arguments of a trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.explain.token_text import token_texts
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvprune.cache.pruned_cache import PrunedCache
    from kvprune.integration.handle import Pruned


def cache_row(
    cache: PrunedCache, row: int, ids: list[int], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """What the cache knows: tokens, drops and sizes."""
    recorded = cache.drop_step[:, row].numpy()  # (L, tokens of the longest row)
    step = np.full((len(recorded), len(ids)), NEVER, dtype=np.int64)
    length = min(step.shape[1], recorded.shape[1])
    step[:, :length] = recorded[:, :length]
    table = cache.stores[0].table
    assert table is not None
    return {
        "tokens": token_texts(tokenizer, ids),
        "ids": tuple(ids),
        "drop_step": step,
        "layers": tuple(cache.pruned_indices),
        "kept_bytes": table.slot_nbytes,
        "dense_bytes": table.dense_nbytes,
    }


def model_of_record(arguments: dict[str, Any], pruned: Pruned | None) -> dict[str, Any]:
    """What its model knows of such a row: names, settings and votes; nothing without one."""
    if pruned is None:
        return {}
    from kvprune.explain import measure

    votes = measure.votes_of(pruned, arguments["ids"], arguments["drop_step"])
    return {**measure.origin(pruned), "votes": votes}
