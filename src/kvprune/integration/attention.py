"""The attention function that transformers calls, and its mask."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvprune.errors import PruneError
from kvprune.integration import host
from kvprune.integration.attend import Call, attend
from kvprune.integration.flat import FlatPass
from kvprune.integration.forward_pass import ForwardPass
from kvprune.integration.layer import Layer, layer_of
from kvprune.integration.operator import InGraph, attend_in_graph
from kvprune.ops.form import AttentionForm

# keyword arguments that the hooks add on the way to the attention function
PASS, HIDDEN = "kvprune_pass", "kvprune_hidden"


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
    forward_pass: ForwardPass | InGraph | FlatPass | None = kwargs.pop(PASS, None)
    hidden: Tensor | None = kwargs.pop(HIDDEN, None)
    layer = layer_of(module)
    if layer is None:
        extra = {"softcap": softcap, "s_aux": s_aux}
        kwargs |= {name: value for name, value in extra.items() if value is not None}
        plain = ALL_ATTENTION_FUNCTIONS.get_interface(inner, host.eager_attention(module))
        output: tuple[Tensor, Tensor | None] = plain(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return output
    assert forward_pass is not None, "the hook of the model did not run"
    assert hidden is not None, "the hook of the attention module did not run"
    _check(layer, query, key, attention_mask, kwargs)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    form = AttentionForm(scaling, softcap, dropout, s_aux)
    if isinstance(forward_pass, InGraph):
        states = hidden, query, key, value
        return attend_in_graph(forward_pass, layer.number, *states, attention_mask, form), None
    call = Call(layer, hidden, query, key, value, form, module.training)
    if isinstance(forward_pass, FlatPass):
        return forward_pass.attend(call).transpose(1, 2).contiguous(), None
    out = attend(forward_pass, call, forward_pass.timeline(attention_mask, query))
    return out.transpose(1, 2).contiguous(), None


def padding_mask(
    inner: str,
    mask_function: Any,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> Any:
    """The mask of a forward pass: the 2-D padding alone for plain causal attention.

    Each pruned layer masks by its own timeline and drop steps. Every other kind of mask (sliding
    layers, packed sequences) is made as `inner` would make it.
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
            f"and one sequence per row"
        )
    if kwargs.get("position_bias") is not None:
        raise PruneError(
            f"{layer.name} adds a learned position bias to its attention, which pruning does not "
            f"support; choose a model with rotary or learned position embeddings"
        )
