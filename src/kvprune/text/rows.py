"""Text for training: rows of exactly n tokens, no padding, and some documents held out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from kvprune.errors import PruneError
from kvprune.text.config import DataConfig as DataConfig
from kvprune.text.tokens import Tokens, tokenise


class Rows(Dataset[dict[str, Tensor]]):
    """Spans of a corpus joined end to end and cut into rows of `length` tokens.

    An incomplete last row is left out. Only a few numbers per document are held in memory; a row
    is read from disk when it is indexed.
    """

    def __init__(self, corpus: Tokens, spans: np.ndarray, length: int) -> None:
        self.corpus = corpus
        self.spans = spans  # (S, 2), start and stop of each in the corpus
        self.length = length
        self.ends = np.cumsum(spans[:, 1] - spans[:, 0])  # (S,), the end of each in the joined text

    @property
    def tokens(self) -> int:
        """Number of tokens, including those of the incomplete row."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def __len__(self) -> int:
        return self.tokens // self.length

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        begin = row % len(self) * self.length
        span = int(np.searchsorted(self.ends, begin, side="right"))
        ids = np.empty(self.length, np.int64)
        filled = 0
        while filled < self.length:
            stop = int(self.spans[span, 1])
            start = stop - (int(self.ends[span]) - begin - filled)
            part = self.corpus.ids[start : min(stop, start + self.length - filled)]
            ids[filled : filled + len(part)] = part
            filled += len(part)
            span += 1
        input_ids = torch.from_numpy(ids)
        # a causal language model shifts its labels itself
        return {"input_ids": input_ids, "labels": input_ids}


@dataclass(frozen=True)
class Data:
    train: Rows
    held_out: Rows | None


def load_rows(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Data:
    """Rows for training and, unless `held_out` is 0, for evaluation; no text is in both.

    `Trainer` and `transformers.default_data_collator` accept them unchanged.
    """
    names = ", ".join(config.sources)
    corpus = _tokens(config, tokenizer, config.sources)
    spans, digests = _spans(corpus), corpus.documents["digest"]
    held_out = None
    if config.held_out_source is not None:
        other = _tokens(config, tokenizer, (config.held_out_source,))
        held_out = _rows(other, _spans(other), config.length, config.held_out_source)
        spans = spans[~np.isin(digests, other.documents["digest"])]
    elif config.held_out:
        total = len(corpus.ids)
        target = _target(config, total)
        if total < target + config.length:
            raise PruneError(
                f"{names} has {total} tokens, but {target} to hold out and a row of "
                f"{config.length} to train on need {target + config.length}; lower length, "
                f"lower held_out or add text"
            )
        spans, held_out_spans = split(spans, digests, target, config.length)
        held_out = _rows(corpus, held_out_spans, config.length, f"the held-out part of {names}")
    spans = spans[np.random.default_rng(config.seed).permutation(len(spans))]
    names += " without the held-out part" if held_out else ""
    if config.whole:
        spans = begin_with_documents(spans, config.length)
    return Data(_rows(corpus, spans, config.length, names), held_out)


def begin_with_documents(spans: np.ndarray, length: int) -> np.ndarray:
    """Spans whose rows of `length` begin with a document, or inside one that is longer than a row.

    A shorter document that a row's end would cut is read twice: its beginning there, and whole at
    the start of the next row.
    """
    out, room = [], length
    for start, stop in spans.tolist():
        size = stop - start
        if size > room and size < length:
            out.append((start, start + room))
            room = length
        out.append((start, stop))
        room = (room - size) % length or length
    return np.array(out, spans.dtype).reshape(-1, 2)


def split(
    spans: np.ndarray, digests: np.ndarray, target: int, length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Spans to train on, and spans of at least `target` tokens to hold out.

    The documents whose texts hash lowest are held out: the same ones for every seed, file name and
    tokenizer, and nearly the same ones when documents are added. Further copies of them are in
    neither part. If full documents would exceed twice the target, or leave too little to train on,
    the last one is cut and only its tail is held out.
    """
    unique, first = np.unique(digests, return_index=True)
    sizes = np.cumsum(spans[first, 1] - spans[first, 0])
    count = min(int(np.searchsorted(sizes, target)) + 1, len(unique))
    held_out = spans[first[:count]]
    train = spans[~np.isin(digests, unique[:count])]
    excess = int(sizes[count - 1]) - target
    if excess > 0 and (excess > target or (train[:, 1] - train[:, 0]).sum() < length):
        start = held_out[-1, 0]
        train = np.concatenate([train, [[start, start + excess]]])
        held_out[-1, 0] += excess
    return train, held_out


def _tokens(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, sources: tuple[str, ...]
) -> Tokens:
    return tokenise(
        sources,
        tokenizer,
        text_field=config.text_field,
        rows_per_document=config.rows_per_document,
        max_tokens=config.max_tokens,
        streaming=config.streaming,
        cache_dir=config.cache_dir,
    )


def _spans(corpus: Tokens) -> np.ndarray:
    ends = corpus.documents["end"].astype(np.int64)
    return np.stack([np.append(0, ends[:-1]), ends], axis=1)  # (documents, 2)


def _target(config: DataConfig, total: int) -> int:
    if config.held_out < 1:
        return max(config.length, math.ceil(config.held_out * total))
    return int(config.held_out) * config.length


def _rows(corpus: Tokens, spans: np.ndarray, length: int, name: str) -> Rows:
    rows = Rows(corpus, spans, length)
    if not len(rows):
        raise PruneError(
            f"{name} has {rows.tokens} tokens, fewer than the {length} of one row; "
            f"lower length or add text"
        )
    return rows
