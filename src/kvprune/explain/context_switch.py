"""The context switch: unrelated texts read one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvprune.errors import PruneError
from kvprune.explain.trace import Trace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvprune.integration.handle import Pruned

# the paper's Tab. contexts, quoted from Wikipedia (CC BY-SA)
TEXTS = (
    "Lebanon, officially the Republic of Lebanon or the Lebanese Republic, is a country in Western "
    "Asia. It is located between Syria to the north and east and Israel to the south, while Cyprus "
    "lies to its west across the Mediterranean Sea; its location at the crossroads of the "
    "Mediterranean Basin and the Arabian hinterland has contributed to its rich history and shaped "
    "a cultural identity of religious diversity.",
    "A motorcycle (motorbike, bike, or trike (if three-wheeled)) is a two or three-wheeled motor "
    "vehicle steered by a handlebar from a saddle-style seat. Motorcycle design varies greatly to "
    "suit a range of different purposes: long-distance travel, commuting, cruising, sport "
    "(including racing), and off-road riding. Motorcycling is riding a motorcycle and being "
    "involved in other related social activity such as joining a motorcycle club and attending "
    "motorcycle rallies.",
    "Zorba's Dance is an instrumental by Greek composer Mikis Theodorakis. The song featured for "
    "the dance, which has become known as sirtaki, in the 1964 film Zorba the Greek, for which "
    "Theodorakis wrote the soundtrack, and became renowned around the world. It is now commonly "
    "played and danced to in Greek tavernas. The film's track has since been recorded as a "
    "standalone song by many different musicians from around the world.",
)


@dataclass(frozen=True)
class ContextSwitch:
    """Per layer, the share of pairs (k, j), j < k, in which token k still sees token j."""

    layers: list[int]
    within: list[float]  # both in the same text
    across: list[float]  # k after a switch, j before it
    expected: list[float] | None  # for the distances of `across`, in texts without a switch
    starts: list[int]  # where each text starts


def trace_texts(
    pruned: Pruned, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = TEXTS
) -> tuple[Trace, list[int]]:
    """The trace of the texts joined by an empty line, and the position where each starts."""
    if len(texts) < 2:
        raise PruneError(f"{len(texts)} text has no switch; give two or more")
    ids: list[int] = []
    starts = []
    for text in texts:
        starts.append(len(ids))
        ids += tokenizer(text if not ids else "\n\n" + text).input_ids
    return Trace.from_ids(pruned, tokenizer, ids), starts


def across_context_switch(
    trace: Trace, starts: Sequence[int], kept_by_distance: Sequence[Sequence[float]] | None = None
) -> ContextSwitch:
    """How much is still seen across a switch.

    Distant tokens are dropped anyway, so compare `across` with `expected`: the same distances in
    a corpus without switches (`Statistics.kept_by_distance`).
    """
    T = len(trace.tokens)
    text_of = np.searchsorted(np.asarray(starts), np.arange(T), side="right")
    earlier = np.tril(np.ones((T, T), dtype=bool), -1)
    same = earlier & (text_of[:, None] == text_of)
    other = earlier & (text_of[:, None] != text_of)
    masks = [trace.visible(layer) for layer in range(len(trace.layers))]
    expected = None
    if kept_by_distance is not None:
        k, j = np.nonzero(other)
        if len(k) and (k - j).max() > len(kept_by_distance[0]):
            raise PruneError(
                f"the texts span {(k - j).max()} tokens, but the corpus was read in rows of "
                f"{len(kept_by_distance[0]) + 1}; read it in longer rows"
            )
        expected = [float(np.asarray(row)[k - j - 1].mean()) for row in kept_by_distance]
    return ContextSwitch(
        list(trace.layers),
        [float(mask[same].mean()) for mask in masks],
        [float(mask[other].mean()) for mask in masks],
        expected,
        list(starts),
    )
