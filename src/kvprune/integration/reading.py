"""How `generate` reads its prompts: a large batch in groups of rows, one after the other.

Before anything is dropped a layer holds all that it is given, so the peak of memory is that of one
group and not of the batch; and a group of short rows does not read the pads of a long one. Rows do
not see each other: any grouping gives the same survivors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvprune.cache.layer import PrunedLayer
from kvprune.cache.pruned_cache import PrunedCache

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned

# tokens of a group: enough for full speed of the matrix products
GROUP = 4096

# what `generate` hands to the model that has one entry per row
BY_ROW = {"attention_mask", "position_ids", "token_type_ids"}
# what does not depend on the rows
SHARED = {"past_key_values", "use_cache", "logits_to_keep", "return_dict"}


def groups(rows: int, length: int) -> list[slice]:
    """Rows that are read together; all of them if the batch is small."""
    size = max(GROUP // max(length, 1), 1)  # no token at all is refused later
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def can_group(pruned: Pruned, ids: Tensor, kwargs: dict[str, Any]) -> bool:
    """Whether the prompts may be read in groups: a plain text model and an empty cache."""
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, PrunedCache) or cache.seen or len(groups(*ids.shape)) == 1:
        return False
    own = {name for name, value in kwargs.items() if value is not None}
    return (
        not own - BY_ROW - SHARED
        and all(type(layer) is PrunedLayer for layer in cache.layers)
        and cache.recorder is None
        and not cache.stores[0].record_past
        and pruned.observer is None
    )


def read(pruned: Pruned, ids: Tensor, kwargs: dict[str, Any]) -> Any:
    """As `model._prefill`: the cache is filled, and the logits of the last token are returned."""
    cache: PrunedCache = kwargs["past_key_values"]
    mask = kwargs.get("attention_mask")
    if mask is None:
        mask = torch.ones_like(ids)
    found, out = [], None
    try:
        for rows in groups(*ids.shape):
            own = mask[rows]
            # pads before all rows of the group are not read
            start = int((own.cumsum(-1) == 0).all(0).sum())
            part = cache._twin()
            given = {name: kwargs[name][rows, start:] for name in BY_ROW & set(kwargs)
                     if kwargs[name] is not None}  # fmt: skip
            shared = {name: kwargs[name] for name in SHARED & set(kwargs)}
            inputs = pruned.model.prepare_inputs_for_generation(  # type: ignore[operator]
                ids[rows, start:], is_first_iteration=True,
                **{**shared, **given, "past_key_values": part},
            )  # fmt: skip
            out = pruned.model(**inputs, return_dict=True)
            found.append(out.logits[:, -1:])
            cache.join(*(part.snapshot(row) for row in range(len(own))))
            part.reset()
    except BaseException:
        cache.reset()
        raise
    for store in cache.stores:
        store.seen = ids.shape[1]
    assert out is not None
    out.logits, out.past_key_values = torch.cat(found), cache
    return out
