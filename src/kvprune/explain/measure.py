"""What a trace asks of its model: votes, losses, and what would have been with a token back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.adapters.dense import as_base_model
from kvprune.errors import PruneError
from kvprune.explain.cost import Miss, Place
from kvprune.explain.misses import find_returns, returned, worst
from kvprune.explain.replay import collecting_votes, losses, read, recorded
from kvprune.explain.votes import Votes

if TYPE_CHECKING:
    from kvprune.explain.trace import Trace
    from kvprune.integration.handle import Pruned

BASE, OPEN = "base model", "open gates"


def origin(pruned: Pruned) -> dict[str, Any]:
    """Which model and settings a trace shows: arguments of Trace."""
    dtype = str(pruned.model.dtype).removeprefix("torch.")
    return {
        "model": Path(pruned.model.config.name_or_path or "").name,
        "adapter": pruned.name,
        "settings": {**pruned.working.to_dict(), "dtype": dtype},
        "pruned": pruned,
    }


def votes_of(pruned: Pruned, ids: Sequence[int], drop_step: np.ndarray) -> Votes | None:
    """The votes behind the drops of a text, by one masked forward pass; None without votes."""
    with collecting_votes(pruned) as votes, pruned.following(recorded(pruned, drop_step)):
        read(pruned, ids)
    return votes()


def with_cost(trace: Trace, pruned: Pruned | None = None) -> Trace:
    """The trace with the loss of every token: as pruned, dense, and with every gate open.

    Dense is the base model, without adapter. Where its weights are not at hand (LoRA was merged,
    or all weights were trained) it is the model itself with every gate open.
    """
    model = model_of(trace, pruned)
    with model.following(recorded(model, trace.drop_step)):
        loss = losses(model, trace.ids)
    with model.dense():
        open_loss = dense_loss = losses(model, trace.ids)
    if model.has_base:
        with as_base_model(model):
            dense_loss = losses(model, trace.ids)
    return replace(
        trace,
        loss=loss,
        dense_loss=dense_loss,
        open_loss=open_loss,
        dense=BASE if model.has_base else OPEN,
    )


def with_misses(
    trace: Trace,
    most: int = 10,
    tries: int = 4,
    pruned: Pruned | None = None,
    progress: bool = False,
) -> Trace:
    """The trace with the `most` tokens that suffered most, and what would have helped each.

    tries: how many returns of dropped tokens are tried for each of them.
    """
    model = model_of(trace, pruned)
    if trace.loss is None or trace.dense_loss is None or trace.open_loss is None:
        trace = with_cost(trace, model)
    loss, dense_loss, open_loss = trace.loss, trace.dense_loss, trace.open_loss
    assert loss is not None
    assert dense_loss is not None
    assert open_loss is not None
    targets = worst(loss, dense_loss, most)
    found = find_returns(model, trace.ids, trace.drop_step, targets, tries, progress)
    misses = [
        Miss(t, float(loss[t]), float(dense_loss[t]), float(open_loss[t]), found[t])
        for t in targets
    ]
    return replace(trace, misses=tuple(misses))


def restore(trace: Trace, places: Sequence[Place], pruned: Pruned | None = None) -> np.ndarray:
    """The loss of every token with tokens brought back, each (token, layer or None): (T,)."""
    for token, layer in places:
        trace.check_place(token, layer)
    model = model_of(trace, pruned)
    with model.following(recorded(model, returned(trace.drop_step, places))):
        return losses(model, trace.ids)


def model_of(trace: Trace, pruned: Pruned | None) -> Pruned:
    """The model to ask: the given one, or where the trace came from; not that of another trace."""
    model = trace.pruned if pruned is None else pruned
    if model is None:
        raise PruneError(
            "the trace does not know its model, as it was loaded from a file or made from a cache; "
            "pass the model that it was made with as pruned="
        )
    layers = tuple(site.index for site in model.sites)
    if layers != trace.layers:
        raise PruneError(
            f"the trace is of {len(trace.layers)} layers {trace.layers}, but this model prunes "
            f"{len(layers)}: {layers}; pass the model that it was made with"
        )
    size = model.model.config.get_text_config().vocab_size
    if max(trace.ids) >= size:
        raise PruneError(
            f"the trace holds token {max(trace.ids)}, but this model knows {size}; pass the model "
            f"that it was made with"
        )
    own = origin(model)
    for name in ("model", "adapter"):
        theirs = getattr(trace, name)
        if theirs and own[name] and theirs != own[name]:
            raise PruneError(
                f"the trace is of the {name} {theirs!r}, but this is {own[name]!r}; pass the model "
                f"that it was made with"
            )
    return model
