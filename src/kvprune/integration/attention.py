"""The attention function that transformers calls, and its mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvprune.cache.pruned_cache import PrunedCache
from kvprune.config import PruningConfig
from kvprune.errors import PruneError
from kvprune.integration import cached, host
from kvprune.integration.deciding import decide, interact
from kvprune.integration.layer import Form, Layer, layer_of, protection
from kvprune.methods import policies
from kvprune.ops.attend.hard import hard_attention
from kvprune.ops.attend.soft import soft_attention
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.keep.drop import kept_pairs
from kvprune.ops.timeline import Timeline


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    inner: str = "sdpa",
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Pruned attention for a layer that is attached, `inner` for one that is left alone.

    query: (B, Hq, T, D), key, value: (B, Hkv, T, D) → (B, T, Hq, D)
    """
    layer = layer_of(module)
    if layer is None:
        extra = {"softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: value for name, value in extra.items() if value is not None}
        plain = ALL_ATTENTION_FUNCTIONS.get_interface(inner, host.eager_attention(module))
        output: tuple[Tensor, Tensor | None] = plain(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return output
    hidden, cache = layer.take()
    _check(layer, query, key, attention_mask, kwargs)
    (B, _, T, D), settings = query.shape, layer.settings
    scaling = D**-0.5 if scaling is None else scaling
    form = Form(AttentionForm(scaling, softcap, dropout, s_aux), module.training)
    is_hard = settings.is_hard(module.training)
    if is_hard and policies.is_scored(settings.config):
        store, backend = None, None
        if isinstance(cache, PrunedCache):
            store, backend = cache.store(layer.index), cache.backend
        out = cached.follow(layer, query, key, value, attention_mask, form, store, backend)
    elif is_hard and isinstance(cache, PrunedCache):
        store = cache.store(layer.index)
        rules = protection(settings.config)
        timeline = cache.timeline(store, attention_mask, (B, T), query.device, rules)
        if T == 1 and s_aux is None and not store.record_past:
            out = cached.decode(
                layer, hidden, query, key, value, timeline, form, store, cache.backend
            )
        else:
            out = cached.read(layer, hidden, query, key, value, timeline, form, store)
    else:
        timeline = settings.timeline(attention_mask, (B, T), query.device)
        attend = hard if is_hard else soft
        out = attend(layer, hidden, query, key, value, timeline, form)
    return out.transpose(1, 2).contiguous(), None


def soft(
    layer: Layer,
    hidden: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    timeline: Timeline,
    form: Form,
) -> Tensor:
    """The training path: the gate is soft, and its sparsity can be differentiated."""
    config, interaction = layer.settings.config, layer.interaction
    assert isinstance(config, PruningConfig)
    assert interaction is not None
    votes = [interaction(hidden)]
    if config.depth_tied:
        layer.votes = votes[0]
        votes = [lower.votes for lower in layer.below if lower.votes is not None] + votes
    gate = Gate(config.gate, layer.settings.alpha)
    out, kept = soft_attention(query, key, value, votes, timeline, gate, form.attention)
    layer.record(kept, timeline, form.training, drop_step=None)
    return out


def hard(
    layer: Layer,
    hidden: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    timeline: Timeline,
    form: Form,
) -> Tensor:
    """The evaluation path, and that of the baselines: a token is dropped or it is not."""
    with torch.no_grad():
        q_int, k_int, beta = interact(layer, hidden)
        steps = decide(layer, q_int, k_int, beta, timeline)
        layer.record(kept_pairs(steps, timeline), timeline, form.training, steps)
    return hard_attention(query, key, value, steps, form.attention)


def padding_mask(
    inner: str,
    mask_function: Any,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """The mask of a forward pass: the 2-D padding alone for plain causal attention.

    Each pruned layer makes its own n × n truth. Every other kind of mask (sliding layers, packed
    sequences) is made as `inner` would make it.
    """
    if mask_function is causal_mask_function:
        return attention_mask
    make = ALL_MASK_ATTENTION_FUNCTIONS[inner]
    return make(mask_function=mask_function, attention_mask=attention_mask, **kwargs)


def _check(
    layer: Layer, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> None:
    if key.shape[2] != query.shape[2]:
        raise PruneError(
            f"{layer.name} was given {query.shape[2]} queries and {key.shape[2]} keys of a cache "
            f"that was not pruned; start from an empty cache or a kvprune.PrunedCache, "
            f"in eval mode"
        )
    if mask is not None and mask.dim() != 2:
        raise PruneError(
            f"{layer.name} was given a {mask.dim()}-D attention mask {tuple(mask.shape)} (a custom "
            f"mask, or packed sequences); pass a 2-D mask (batch, tokens) of real tokens, "
            f"and one sequence a row"
        )
    if kwargs.get("position_bias") is not None:
        raise PruneError(
            f"{layer.name} adds a learned position bias to its attention, which pruning does not "
            f"support; choose a model with rotary or learned position embeddings"
        )
