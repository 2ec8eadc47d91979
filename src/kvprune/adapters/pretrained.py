"""The dense model and the tokenizer under a name; kvprune.adapters.resolve lists the names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvprune import tiny
from kvprune.adapters.bases import find_base
from kvprune.adapters.resolve import OWN, own_name, resolve_base
from kvprune.adapters.source import locate
from kvprune.errors import PruneError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_base(name: str | Path, dtype: str = "auto") -> PreTrainedModel:
    """The dense model in eval mode. `dtype`: auto is that of its file.

    Our own models are float32 then: most CPUs are slow in bfloat16.
    """
    from transformers import AutoModelForCausalLM

    base = resolve_base(name).base
    own = own_name(base)
    if own and dtype == "auto":
        dtype = "float32"
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(readable(base), dtype=dtype)
    except (OSError, ValueError) as error:
        raise _cannot_load("model", base, error) from error
    if own:
        # an adapter records what it was trained on, and other machines have other folders
        model.config.name_or_path = own
    model.eval()
    return model


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    location = resolve_base(name).tokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(readable(location))
    except (OSError, ValueError) as error:
        raise _cannot_load("tokenizer", location, error) from error
    return tokenizer


def readable(base: str) -> str | Path:
    """What transformers can read: the folder of one of our own, fetched if necessary, or `base`."""
    if base == tiny.NAME:
        return tiny.FOLDER
    own = find_base(base)
    return locate(own)[0] if own else base


def _cannot_load(what: str, name: str, error: Exception) -> PruneError:
    reason = str(error).strip().splitlines()[0]
    return PruneError(
        f"cannot load the {what} {name!r}: {reason} "
        f"(a folder with config.json, weights and tokenizer, a name on the hub, "
        f"{', '.join(OWN[:-1])} or {OWN[-1]})"
    )
