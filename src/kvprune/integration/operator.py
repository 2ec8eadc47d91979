"""Attention as one operator of torch: all that `torch.compile` sees of a pruned layer.

What a pass does with its cache is plain Python, and sizes change at every step. A compiler that
looked inside would stop at it or compile again and again. So the operator takes numbers in place of
model and cache, and the graph is the same whatever the rows hold.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvprune.integration.attend import Call, attend
from kvprune.integration.forward_pass import ForwardPass
from kvprune.ops.form import AttentionForm
from kvprune.utils.handles import owner_of

if TYPE_CHECKING:
    from kvprune.cache.pruned_cache import PrunedCache
    from kvprune.integration.hooks import Hooks

LIBRARY = torch.library.Library("kvprune", "FRAGMENT")
LIBRARY.define(
    "attend(Tensor model, Tensor(a!)? cache, int layer, Tensor hidden, Tensor query, Tensor key, "
    "Tensor value, Tensor? mask, Tensor? sinks, float scaling, float? softcap) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)


class InGraph(NamedTuple):
    """Stands for a forward pass while a graph is traced: the pass itself begins when it runs."""

    model: Tensor  # handle of the model's hooks
    cache: Tensor | None  # handle of the cache


# passes that have begun, by their cache, or by the model's hooks without one
RUNNING: weakref.WeakKeyDictionary[PrunedCache | Hooks, ForwardPass] = weakref.WeakKeyDictionary()


def attend_in_graph(
    traced: InGraph,
    layer: int,
    hidden: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    form: AttentionForm,
) -> Tensor:
    """`attend`, as an operator of the graph: (B, T, Hq, Dv)."""
    out: Tensor = torch.ops.kvprune.attend(
        *traced, layer, hidden, query, key, value, mask, form.sinks, form.scaling, form.softcap
    )
    return out


def _attend(
    model: Tensor,
    cache: Tensor | None,
    layer: int,
    hidden: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    hooks: Hooks = owner_of(model)
    own: PrunedCache | None = None if cache is None else owner_of(cache)
    owner = hooks if own is None else own
    if layer == 0:
        if (broken := RUNNING.pop(owner, None)) is not None:
            hooks.break_off(broken)
        RUNNING[owner] = hooks.begin_pass(own)
    run = RUNNING[owner]
    form = AttentionForm(scaling, softcap, 0.0, sinks)
    call = Call(hooks.pruned.layers[layer], hidden, query, key, value, form, training=False)
    try:
        out = attend(run, call, run.timeline(mask, query))
    except BaseException:
        hooks.break_off(RUNNING.pop(owner))
        raise
    if layer == len(hooks.pruned.layers) - 1:
        hooks.end_pass(RUNNING.pop(owner))
    return out.transpose(1, 2).contiguous()


def _fake(
    model: Tensor,
    cache: Tensor | None,
    layer: int,
    hidden: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    B, H, T, _ = query.shape
    return query.new_empty(B, T, H, value.shape[-1])


LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("kvprune::attend", _fake, lib=LIBRARY)
