"""The same text read once more, to compare two adapters or two settings."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvprune.errors import PruneError
from kvprune.explain.trace import Trace
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvprune.integration.handle import Pruned


def read_again(trace: Trace, pruned: Pruned, tokenizer: PreTrainedTokenizerBase) -> Trace:
    """What this model drops from the text of a trace, tokens that were generated included."""
    T = len(trace.ids)
    if max(trace.ids) >= len(tokenizer):
        raise PruneError(
            f"the text has token {max(trace.ids)}, but this tokenizer has {len(tokenizer)}; "
            f"compare two adapters of the same model"
        )
    again = Trace.from_ids(pruned, tokenizer, trace.ids)
    if again.tokens != trace.tokens:
        raise PruneError(
            "the two models have different tokenizers; compare two adapters of the same model"
        )
    step = again.drop_step
    if trace.prompt < T:
        # the last token was generated but never read: there it drops nothing, so here neither
        step = np.where(step == T - 1, NEVER, step)
    return replace(again, prompt=trace.prompt, drop_step=step)
