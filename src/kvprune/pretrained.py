"""Pretrained models by name: a folder, a name on the hub, or the package's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvprune import tiny
from kvprune.errors import PruneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_base(name: str | Path, dtype: str = "auto") -> PreTrainedModel:
    """The dense model, ready to read. `dtype`: auto keeps what its file has."""
    from transformers import AutoModelForCausalLM

    if str(name) == tiny.NAME:
        return tiny.load_model()
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    except (OSError, ValueError) as error:
        raise _cannot("model", name, error) from error
    return model.eval()


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    folder = tiny.FOLDER if str(name) == tiny.NAME else name
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise _cannot("tokenizer", name, error) from error
    return tokenizer


def _cannot(what: str, name: str | Path, error: Exception) -> PruneError:
    reason = str(error).strip().splitlines()[0]
    return PruneError(
        f"cannot load the {what} {str(name)!r}: {reason} "
        f"(a folder with config.json, weights and tokenizer, a name on the hub, or {tiny.NAME})"
    )
