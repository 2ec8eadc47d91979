"""Pretrained models by name: a folder, a name on the hub, or one of our own names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvprune import tiny
from kvprune.adapters.bases import BASES, find_base
from kvprune.adapters.source import locate
from kvprune.errors import PruneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OWN = (tiny.NAME, *BASES)


def load_base(name: str | Path, dtype: str = "auto") -> PreTrainedModel:
    """The dense model, ready to read. `dtype`: auto keeps what its file has.

    Our own models are float32 then: most CPUs are slow in bfloat16.
    """
    from transformers import AutoModelForCausalLM

    own = own_name(name)
    if own and dtype == "auto":
        dtype = "float32"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(readable(name), dtype=dtype)
    except (OSError, ValueError) as error:
        raise _cannot("model", name, error) from error
    if own:
        # an adapter remembers what it was trained on, and other machines have other folders
        model.config.name_or_path = own
    return model.eval()


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(readable(name))
    except (OSError, ValueError) as error:
        raise _cannot("tokenizer", name, error) from error
    return tokenizer


def own_name(name: str | Path) -> str | None:
    """What an adapter calls this base, if it is one of our own."""
    if str(name) == tiny.NAME:
        return tiny.NAME
    base = find_base(str(name))
    return base.name if base else None


def readable(name: str | Path) -> str | Path:
    """What transformers can read: the folder of one of our own, else the name itself."""
    if str(name) == tiny.NAME:
        return tiny.FOLDER
    base = find_base(str(name))
    return locate(base)[0] if base else name


def _cannot(what: str, name: str | Path, error: Exception) -> PruneError:
    reason = str(error).strip().splitlines()[0]
    return PruneError(
        f"cannot load the {what} {str(name)!r}: {reason} "
        f"(a folder with config.json, weights and tokenizer, a name on the hub, "
        f"{', '.join(OWN[:-1])} or {OWN[-1]})"
    )
