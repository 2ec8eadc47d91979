"""The dense model and the tokenizer under a name; kvprune.adapters.resolve lists the names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvprune import tiny
from kvprune.adapters import hub
from kvprune.adapters.bases import BASES, DENSE, find_base
from kvprune.adapters.resolve import OWN, is_hub_name, own_name, resolve_base
from kvprune.adapters.saved_file import FILE
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
    place = readable(base)
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
    except (OSError, ValueError) as error:
        raise cannot_load("model", base, error) from error
    # an adapter records what it was trained on, and other machines have other folders
    model.config.name_or_path = base
    model.eval()
    return model


def load_tokenizer(name: str | Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    location = resolve_base(name).tokenizer
    place = readable(location)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise cannot_load("tokenizer", location, error) from error
    # for some models transformers makes an empty one where there are no files
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise _error("tokenizer", location, "it has no vocabulary")
    return tokenizer


def readable(base: str) -> str | Path:
    """What transformers can read: a folder, fetched if necessary, or a name on the hub."""
    if base == tiny.NAME:
        return tiny.FOLDER
    if own := find_base(base):
        return locate(own)[0]
    return _on_the_hub(base) if not Path(base).exists() else base


def check_present(name: str) -> None:
    """Refuse a name that stands for nothing, or for what is neither here nor within reach."""
    if is_hub_name(name) and hub.local_copy(name, FILE) is None:
        _on_the_hub(name)


def _on_the_hub(name: str) -> str | Path:
    if not hub.unreachable():
        return name
    # the folder: by name, transformers asks the hub again for files that it does not find
    if (copy := hub.local_copy(name, "config.json")) is not None:
        return copy
    raise _error("model", name, hub.away())


def cannot_load(what: str, name: str, error: Exception) -> PruneError:
    """Why the model, its tokenizer or its configuration cannot be loaded, and what can be."""
    return _error(what, name, str(error).strip().splitlines()[0])


def _error(what: str, name: str, reason: str) -> PruneError:
    ours = next((base.name + DENSE for base in BASES.values() if base.hub == name), None)
    hint = f"{ours} is the same model; " if ours else ""
    return PruneError(
        f"cannot load the {what} {name!r}: {reason} ({hint}pass a folder with config.json, weights "
        f"and tokenizer, a name on the hub, {', '.join(OWN[:-1])} or {OWN[-1]})"
    )
