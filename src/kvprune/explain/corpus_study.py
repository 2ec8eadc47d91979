"""The paper's statistics on what is dropped, for one model and one corpus."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.errors import PruneError
from kvprune.explain.context_switch import (
    TEXTS,
    ContextSwitch,
    across_context_switch,
    trace_texts,
)
from kvprune.explain.nearest_keys import NearestKeys, nearest_keys
from kvprune.explain.statistics import Statistics, statistics
from kvprune.explain.trace import Trace
from kvprune.text.sources import find
from kvprune.utils.files import write_atomically
from kvprune.utils.processes import ALONE, Group

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvprune.integration.handle import Pruned


@dataclass(frozen=True)
class Study:
    """All statistics, and the trace of the context switch for the figure of its masks."""

    statistics: Statistics
    nearest: dict[str, NearestKeys]  # among all other tokens, and among those that stay
    switch: ContextSwitch
    switch_trace: Trace
    about: dict[str, Any]

    def to_plain(self) -> dict[str, Any]:
        """The numbers for JSON: five decimals, null for NaN."""
        values = {
            "about": self.about,
            "statistics": asdict(self.statistics),
            "nearest": {name: asdict(distances) for name, distances in self.nearest.items()},
            "switch": asdict(self.switch),
        }
        plain: dict[str, Any] = _plain(values)
        return plain

    def save(self, path: str | Path) -> Path:
        """Write the numbers as JSON."""
        file = Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_plain(), indent=1, ensure_ascii=False)
        write_atomically(file, text.encode())
        return file


def study_corpus(
    pruned: Pruned,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    length: int = 512,
    rows: int = 32,
    texts: Sequence[str] = TEXTS,
    group: Group = ALONE,
) -> Study:
    """Read `rows` rows of the corpus and the texts of the context switch, and count.

    Processes of a `group` share the rows, and all return the same.
    """
    ids = group.together(lambda: list(islice(read_rows(sources, tokenizer, length), rows)))
    if not ids:
        raise PruneError(
            f"no document of {', '.join(sources)} has {length} tokens; lower the length"
        )
    group.agree(lambda: {"text": hashlib.sha256(repr(ids).encode()).hexdigest()[:16]})
    traces = group.map(ids, lambda row: Trace.from_ids(pruned, tokenizer, row, votes=False))
    counts = statistics(list(traces))
    trace, starts = trace_texts(pruned, tokenizer, texts)
    # the rows hold no distances beyond their length
    by_distance = counts.kept_by_distance if len(trace.tokens) <= length else None
    about = {"model": trace.model, "rows": len(ids), "length": length, "config": str(pruned.config)}
    distances = {
        "another token": nearest_keys(pruned, ids, group=group),
        "another that stays": nearest_keys(pruned, ids, among_kept=True, group=group),
    }
    switch = across_context_switch(trace, starts, by_distance)
    return Study(counts, distances, switch, trace, about)


def read_rows(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[list[int]]:
    """Rows of `length` tokens, each within one document, alternating between the sources."""
    if length < 2:
        raise PruneError(f"length={length} leaves no earlier token to drop; use 2 or more")
    readers = [_rows_of(source, tokenizer, length) for source in sources]
    while readers:
        for reader in list(readers):
            row = next(reader, None)
            if row is None:
                readers.remove(reader)
            else:
                yield row


def _rows_of(source: str, tokenizer: PreTrainedTokenizerBase, length: int) -> Iterator[list[int]]:
    # a book is long: tokenise only as much of it as is consumed
    chunk = 32 * length
    for document in find(source).documents("text", None, True):
        for start in range(0, len(document), chunk):
            ids = tokenizer(document[start : start + chunk], verbose=False).input_ids
            for first in range(0, len(ids) - length + 1, length):
                yield ids[first : first + length]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value
