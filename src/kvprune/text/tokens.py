"""A corpus as token ids: tokenised once, stored on disk, memory-mapped from there."""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kvprune.errors import PruneError
from kvprune.text.sources import find
from kvprune.utils.files import cache_folder, make_folder_once
from kvprune.version import __version__

FORMAT = 1
DOCUMENT = np.dtype([("end", "<u8"), ("digest", "<u8")])

# characters per call of the tokenizer, and where a longer document is split for it
BATCH = 1 << 20
PIECE = 1 << 22


@dataclass(frozen=True)
class Tokens:
    """All documents, concatenated; `documents` holds the end and a hash of each."""

    folder: Path
    ids: np.ndarray  # (tokens,), mapped from disk
    documents: np.ndarray  # (documents,) of DOCUMENT

    def __reduce__(self) -> Any:
        # a worker process maps the file again: pickling would copy all of it
        return read_tokens, (self.folder,)


def tokenise(
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    text_field: str = "text",
    rows_per_document: int | None = None,
    max_tokens: int | None = None,
    streaming: bool = True,
    cache_dir: str | Path | None = None,
) -> Tokens:
    """The documents of all sources, each followed by the end-of-text token; cached on disk.

    One process works while others that want the same tokens wait. What a killed process leaves is
    never read: the folder gets its name when it is complete.
    """
    corpora = [find(source) for source in sources]
    about: dict[str, Any] = {
        "format": FORMAT,
        "sources": [source.identity() for source in corpora],
        "tokenizer": _fingerprint(tokenizer),
        "text_field": text_field,
        "rows_per_document": rows_per_document,
        "max_tokens": max_tokens,
    }
    key = _sha256(about)[:32]
    root = cache_folder(cache_dir) / "tokens"

    def make(partial: Path) -> None:
        texts = (s.documents(text_field, rows_per_document, streaming) for s in corpora)
        counts = _write(partial, zip(sources, texts, strict=True), tokenizer, max_tokens)
        complete = {**about, "kvprune": __version__, **counts}
        (partial / "about.json").write_text(json.dumps(complete, indent=1))

    try:
        return read_tokens(make_folder_once(root / key, make, _is_complete))
    # reading the sources turns OSErrors into PruneErrors: these are of the cache
    except OSError as error:
        raise PruneError(
            f"the token cache in {root} cannot be written: {error}; set cache_dir or "
            f"KVPRUNE_CACHE to a folder with free space"
        ) from error


def read_tokens(folder: Path) -> Tokens:
    about = json.loads((folder / "about.json").read_text())
    ids = np.memmap(folder / "tokens.bin", mode="r", dtype=about["dtype"], shape=about["tokens"])
    documents = np.load(folder / "documents.npy", mmap_mode="r")
    # plain arrays over the same maps: slices of np.memmap are slower
    return Tokens(folder, np.asarray(ids), np.asarray(documents))


def _is_complete(folder: Path) -> bool:
    """Whether the folder can be read; a damaged one is written again."""
    try:
        read_tokens(folder)
    except (OSError, ValueError, EOFError):
        return False
    return True


def _write(
    folder: Path,
    sources: Iterable[tuple[str, Iterator[str]]],
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int | None,
) -> dict[str, Any]:
    opening, closing = _frame(tokenizer)
    largest = max(tokenizer.get_vocab().values())
    dtype = np.dtype("<u2" if largest < 1 << 16 else "<u4")
    ends, digests = array("Q"), array("Q")
    written = 0
    with (
        open(folder / "tokens.bin", "wb") as out,
        tqdm(desc="tokenising", unit=" tokens", unit_scale=True, disable=None) as progress,
    ):
        for source, texts in sources:
            start = written
            for text, ids in _encoded(texts, tokenizer):
                ids = [*opening, *ids, *closing]
                if max_tokens is not None:
                    ids = ids[: max_tokens - (written - start)]
                out.write(np.asarray(ids, dtype).tobytes())
                written += len(ids)
                progress.update(len(ids))
                ends.append(written)
                digests.append(_digest(text))
                if max_tokens is not None and written - start == max_tokens:
                    break
            if written == start:
                raise PruneError(f"{source} holds no text; pass a source that does")
        out.flush()
        os.fsync(out.fileno())
    documents = np.empty(len(ends), DOCUMENT)
    documents["end"], documents["digest"] = ends, digests
    np.save(folder / "documents.npy", documents)
    return {"dtype": dtype.str, "tokens": written, "documents": len(documents)}


def _encoded(
    texts: Iterator[str], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, list[int]]]:
    """Each text that is not blank, with its tokens."""
    for batch in _batches(texts):
        pieces = [_pieces(text) for text in batch]
        encoded = iter(
            tokenizer(
                [piece for cut in pieces for piece in cut],
                add_special_tokens=False,
                return_attention_mask=False,
                # no warning that a text is longer than the model's context
                verbose=False,
            )["input_ids"]
        )
        for text, cut in zip(batch, pieces, strict=True):
            yield text, [i for _ in cut for i in next(encoded)]


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        if not text or text.isspace():
            continue
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _pieces(text: str) -> list[str]:
    """A tokenizer needs about 100 bytes per token: very long texts are split, before a space.

    Tokens of byte-level BPE never cross the boundary between a letter and a single space.
    """
    pieces, start = [], 0
    while len(text) - start > PIECE:
        stop = start + PIECE
        for i in range(stop, max(start, stop - 10_000), -1):
            if text[i] == " " and text[i - 1].isalnum() and not text[i + 1 : i + 2].isspace():
                stop = i
                break
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens before and after a document: BOS if the tokenizer adds it, and EOS."""
    if tokenizer.eos_token_id is None:
        raise PruneError(
            "the tokenizer has no end-of-text token to separate documents with; "
            "set tokenizer.eos_token"
        )
    special = tokenizer("")["input_ids"]
    bos = tokenizer.bos_token_id
    opening = [bos] if bos is not None and special[:1] == [bos] else []
    return opening, [tokenizer.eos_token_id]


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """The same for equal tokenizers, whatever their name or earlier use."""
    if tokenizer.is_fast:
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        # these two depend on the last call
        content.pop("truncation", None)
        content.pop("padding", None)
    else:
        content = [type(tokenizer).__name__, tokenizer.init_kwargs, tokenizer.get_vocab()]
    return _sha256([content, tokenizer.bos_token_id, tokenizer.eos_token_id])


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
