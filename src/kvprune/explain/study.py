"""All of the paper's findings on what is forgotten, for one model and one corpus."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.errors import PruneError
from kvprune.explain.keys import Nearest, nearest
from kvprune.explain.statistics import Statistics, statistics
from kvprune.explain.switch import TEXTS, Switch, read_switch, switch
from kvprune.explain.trace import Trace
from kvprune.text.sources import find
from kvprune.utils.files import write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvprune.integration.handle import Pruned


@dataclass(frozen=True)
class Study:
    """The counts, and one trace to draw: that of the context switch."""

    statistics: Statistics
    nearest: dict[str, Nearest]  # to any other token, and to another that stays
    switch: Switch
    switch_trace: Trace
    about: dict[str, Any]

    def to_plain(self) -> dict[str, Any]:
        """The numbers for JSON: five decimals, and null for a mean of nothing."""
        values = {
            "about": self.about,
            "statistics": asdict(self.statistics),
            "nearest": {name: asdict(found) for name, found in self.nearest.items()},
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


def study(
    pruned: Pruned,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[str],
    length: int = 512,
    rows: int = 32,
    texts: Sequence[str] = TEXTS,
) -> Study:
    """Read so many rows of the corpus, and the texts of the context switch; count all."""
    ids = list(islice(read_rows(sources, tokenizer, length), rows))
    if not ids:
        raise PruneError(
            f"no document of {', '.join(sources)} has {length} tokens; lower the length"
        )
    counted = statistics([Trace.from_ids(pruned, tokenizer, row) for row in ids])
    trace, starts = read_switch(pruned, tokenizer, texts)
    # texts longer than the rows have no distances to be held against
    by_distance = counted.kept_by_distance if len(trace.tokens) <= length else None
    about = {"model": trace.model, "rows": len(ids), "length": length, "config": str(pruned.config)}
    distances = {
        "another token": nearest(pruned, ids),
        "another that stays": nearest(pruned, ids, among_kept=True),
    }
    return Study(counted, distances, switch(trace, starts, by_distance), trace, about)


def read_rows(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int
) -> Iterator[list[int]]:
    """Rows of so many tokens, each within one document, from the sources in turn."""
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
    # a book is long: tokenise as much of it as rows are asked for
    part = 32 * length
    for document in find(source).documents("text", None, True):
        for start in range(0, len(document), part):
            ids = tokenizer(document[start : start + part], verbose=False).input_ids
            for first in range(0, len(ids) - length + 1, length):
                yield ids[first : first + length]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 5) if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value
