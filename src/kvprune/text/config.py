"""Which text, and how it is cut. The annotations are the documentation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvprune.errors import PruneError
from kvprune.utils.checks import check_number


@dataclass(frozen=True)
class DataConfig:
    """Which text, and how it is cut."""

    sources: Annotated[
        tuple[str, ...],
        "files, folders, patterns, wikipedia, bookcorpus, or hub datasets: owner/name:config@split",
    ]
    length: Annotated[int, "tokens per row"] = 1024
    whole: Annotated[
        bool, "begin each row with a document, unless it is a piece of one longer than a row"
    ] = False
    held_out: Annotated[
        float,
        "held out for evaluation: a share of the tokens (0.01) or a number of rows (64), rounded "
        "up to full documents; 0 for none",
    ] = 0.01
    held_out_source: Annotated[
        str | None, "evaluate on this source instead; its documents are left out of training"
    ] = None
    seed: Annotated[int, "order of the documents; what is held out does not depend on it"] = 0
    text_field: Annotated[str, "field of JSON, parquet and hub rows that holds the text"] = "text"
    rows_per_document: Annotated[
        int | None,
        "consecutive JSON, parquet or hub rows that form one document; by default 1, and more for "
        "bookcorpus, whose rows are sentences",
    ] = None
    max_tokens: Annotated[int | None, "maximum number of tokens per source"] = None
    streaming: Annotated[bool, "read hub datasets while downloading, and store only tokens"] = True
    cache_dir: Annotated[
        str | None, "where tokens are stored; by default KVPRUNE_CACHE or ~/.cache/kvprune"
    ] = None

    def __post_init__(self) -> None:
        is_single = isinstance(self.sources, str | Path)
        sources = (self.sources,) if is_single else self.sources
        object.__setattr__(self, "sources", tuple(map(str, sources)))
        if not self.sources:
            raise PruneError("sources is empty; name a file, a folder or a hub dataset")
        check_number(self, "length", integer=True, at_least=2)
        check_number(self, "seed", integer=True, at_least=0)
        for name in ("rows_per_document", "max_tokens"):
            if getattr(self, name) is not None:
                check_number(self, name, integer=True, at_least=1)
        held_out = self.held_out
        if (
            isinstance(held_out, bool)
            or not isinstance(held_out, int | float)
            or not (0 <= held_out < 1 or (held_out >= 1 and held_out == held_out // 1))
        ):
            raise PruneError(
                f"held_out={held_out!r} must be a share below 1 or a whole number of rows"
            )
