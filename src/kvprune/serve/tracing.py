"""The trace of a row that was served, for the explain page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvprune.explain import Trace, measure
from kvprune.explain.token_text import token_texts

if TYPE_CHECKING:
    from torch import Tensor

    from kvprune.integration.handle import Pruned


def trace_of(pruned: Pruned, tokens: list[int], drop_step: Tensor, sizes: tuple[int, int]) -> Trace:
    """Who dropped whom; without votes, for which the model would have to read it all again.

    drop_step: (L, tokens); sizes: bytes of a token in one layer, here and in a dense cache.
    """
    return Trace(
        tokens=token_texts(pruned.tokenizer, tokens),
        ids=tuple(tokens),
        drop_step=drop_step.numpy(),
        layers=tuple(site.index for site in pruned.sites),
        kept_bytes=sizes[0],
        dense_bytes=sizes[1],
        prompt=len(tokens),
        **measure.origin(pruned),
    )
