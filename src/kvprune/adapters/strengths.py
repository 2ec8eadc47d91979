"""Several adapters of one base, over one copy of its weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvprune.adapters.load import attach_beside, move
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.adapters.resolve import Location, resolve
from kvprune.config import DenseConfig
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned, attach
from kvprune.integration.row_lora import run_together, twin

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_strengths(
    names: Sequence[str],
    dtype: str = "auto",
    device: str | None = None,
    prepare: Callable[[PreTrainedModel], None] = lambda model: None,
) -> dict[str, Pruned]:
    """Models by name, which differ in their adapters only: their base is in memory once.

        load_strengths(["smollm2-135m-70", "smollm2-135m-80", "smollm2-135m-dense"])

    Each is a whole model. `flat_forward` of the first reads rows of all of them in one pass.
    `prepare` gets the base before anything is attached.
    """
    if twice := [name for name in names if list(names).count(name) > 1]:
        raise PruneError(f"{twice[0]} is named twice; each model is served once")
    places = {name: resolve(name) for name in names}
    _check_one_base(places)
    first = places[names[0]]
    base = load_base(first.base, dtype)
    move(base, device)
    prepare(base)
    tokenizer = _one_tokenizer(places)
    # all twins before anything is attached
    hosts = [base, *(twin(base) for _ in names[1:])]
    loaded = {}
    for (name, place), host in zip(places.items(), hosts, strict=True):
        if place.adapter is None:
            pruned = attach(host, DenseConfig())
        else:
            pruned = attach_beside(host, place.adapter)
        pruned.tokenizer_name, pruned.tokenizer = place.tokenizer, tokenizer
        loaded[name] = pruned
    run_together(list(loaded.values()))
    return loaded


def _check_one_base(places: dict[str, Location]) -> None:
    (name, first), *others = places.items()
    for other, place in others:
        if _base(place) != _base(first):
            raise PruneError(
                f"{other} is of the base {place.base}, but {name} of {first.base}; models of "
                f"different bases share no weights: start a server for each"
            )


def _base(place: Location) -> str:
    """A folder may be written in several ways."""
    folder = Path(place.base)
    return str(folder.resolve()) if folder.is_dir() else place.base


def _one_tokenizer(places: dict[str, Location]) -> PreTrainedTokenizerBase:
    (name, first), *others = places.items()
    tokenizer = load_tokenizer(first.tokenizer)
    for other, place in others:
        if place.tokenizer == first.tokenizer:
            continue
        second = load_tokenizer(place.tokenizer)
        same = second.get_vocab() == tokenizer.get_vocab()
        if not same or second.chat_template != tokenizer.chat_template:
            raise PruneError(
                f"{other} and {name} have different tokenizers or chat templates; start a server "
                f"for each"
            )
    return tokenizer
