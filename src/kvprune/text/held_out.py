"""The text that a training run held out, to evaluate on nothing that was trained on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvprune.errors import PruneError
from kvprune.text.config import DataConfig
from kvprune.text.rows import Rows, load_rows


def held_out_tokens(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """The tokens (n,) that training with this text leaves out, document after document.

    Which documents these are depends on the hashes of all texts of the sources: the sources, their
    max_tokens and held_out must be those of the run.
    """
    rows = load_rows(replace(config, whole=False), tokenizer).held_out
    if rows is None:
        raise PruneError("held_out is 0: training leaves no text out; pass a text of its own")
    return _joined(rows)


def _joined(rows: Rows) -> Tensor:
    spans = [rows.corpus.ids[start:stop] for start, stop in rows.spans.tolist()]
    return torch.cat([torch.from_numpy(span.astype("int64")) for span in spans])


def share(text: str) -> float | None:
    """A share or a number of rows, as a number; None for the name of a run."""
    try:
        return float(text)
    except ValueError:
        if not Path(text).exists():
            raise PruneError(
                f"{text} is neither a number (a share such as 0.01, or rows) nor the folder or "
                f"recipe of a run"
            ) from None
        return None
