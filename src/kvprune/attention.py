"""The attention function that transformers calls, and its mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvprune import baselines, host
from kvprune.cache import PrunedCache, PrunedLayer
from kvprune.config import PruningConfig
from kvprune.errors import PruneError
from kvprune.layer import Layer, layer_of, protection
from kvprune.ops.attend.hard import hard_attention
from kvprune.ops.attend.soft import SoftOptions, soft_attention
from kvprune.ops.decode import Votes
from kvprune.ops.decode import decode as decode_step
from kvprune.ops.gate import Gate
from kvprune.ops.keep.drop import drop_steps, kept_pairs
from kvprune.ops.timeline import NEVER, Timeline
from kvprune.slots import Slots


class Form(NamedTuple):
    """How the host model shapes its attention."""

    scaling: float
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    training: bool


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
    form = Form(scaling, dropout, softcap, s_aux, module.training)
    is_hard = settings.is_hard(module.training)
    if is_hard and isinstance(cache, PrunedCache):
        store = cache.store(layer.index)
        rules = protection(settings.config)
        timeline = cache.timeline(store, attention_mask, (B, T), query.device, rules)
        if T == 1 and s_aux is None and not store.record_past:
            out = decode(layer, hidden, query, key, value, timeline, form, store, cache.backend)
        else:
            out = read(layer, hidden, query, key, value, timeline, form, store)
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
    options = SoftOptions(gate, form.scaling, form.softcap, form.dropout)
    out, kept = soft_attention(query, key, value, votes, timeline, options, form.sinks)
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
    return hard_attention(
        query, key, value, steps, form.scaling, form.softcap, form.dropout, form.sinks
    )


def read(
    layer: Layer,
    hidden: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    timeline: Timeline,
    form: Form,
    store: PrunedLayer,
) -> Tensor:
    """A prompt, or a part of one, into the cache: only what survives it is stored."""
    store.begin(key, value)
    past = store.past()
    with torch.no_grad():
        q_int, k_int, beta = interact(layer, hidden)
        new = Slots(key.detach(), value.detach(), k_int, timeline.clock.long(), timeline.clock >= 0)
        if past.token.shape[1]:
            timeline = timeline.after(past.token, past.valid, protection(layer.settings.config))
            k_int = torch.cat([past.key_int, k_int], 1)
        steps = decide(layer, q_int, k_int, beta, timeline, past.token)
        kept = kept_pairs(steps, timeline)
        layer.record(kept, timeline, form.training, steps[:, timeline.past :])
        # a free slot still shows the number of a token that left, or moved
        held = past.token.where(past.valid, -1)
        layer.below_steps = (torch.cat([held, new.token], 1), steps)
    if past.token.shape[1]:
        key, value = torch.cat([past.keys, key], 2), torch.cat([past.values, value], 2)
    out = hard_attention(
        query, key, value, steps, form.scaling, form.softcap, form.dropout, form.sinks
    )
    if store.trace is not None:
        gone = (steps < NEVER) & (timeline.visible_from < NEVER)
        token = layer.below_steps[0].where(gone, -1)
        dropper = new.token.gather(1, steps.clamp(0, new.token.shape[1] - 1))
        store.trace.note(token, dropper, int(new.token.max()) + 1)
    store.absorb(new, steps)
    return out


@torch.no_grad()
def decode(
    layer: Layer,
    hidden: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    timeline: Timeline,
    form: Form,
    store: PrunedLayer,
    backend: str | None,
) -> Tensor:
    """One token: it votes, the losers leave, it attends to the survivors and takes a slot."""
    config, table = layer.settings.config, store.begin(key, value)
    now = timeline.clock[:, 0].long()
    votes, also_drop = None, None
    if isinstance(config, PruningConfig):
        q_int, k_int, beta = interact(layer, hidden)
        votes = Votes(
            q_int[:, 0], k_int[:, 0], beta, config.threshold,
            config.protect_first, config.protect_recent,
        )  # fmt: skip
        if config.depth_tied and layer.below:
            also_drop = _contains(table.get().token, layer.below[-1].dropped)
    else:
        also_drop = baselines.drop_position(config, table.get().token) <= now[:, None]
    active = timeline.clock[:, 0] >= 0 if timeline.padded else None
    done = decode_step(
        table, query, key, value, now, scaling=form.scaling, votes=votes, softcap=form.softcap,
        active=active, also_drop=also_drop, backend=backend,
    )  # fmt: skip
    store.seen += 1
    layer.dropped = done.dropped
    if store.trace is not None:
        store.trace.note(done.dropped, now[:, None], int(now.max()) + 1)
    layer.record_decode(table, timeline)
    return done.output


def interact(layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_int / √r, k_int, β; of no width for a baseline, which does not vote."""
    if layer.interaction is not None:
        made: tuple[Tensor, Tensor, Tensor] = layer.interaction(hidden)
        return made
    nothing = hidden.new_empty(*hidden.shape[:2], 0, dtype=torch.float32)
    return nothing, nothing, nothing.new_zeros(())


def decide(
    layer: Layer,
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor,
    timeline: Timeline,
    past: Tensor | None = None,
) -> Tensor:
    """The drop step of every key in this layer: (B, P + T); past: (B, P), their token numbers."""
    config = layer.settings.config
    if not isinstance(config, PruningConfig):
        return baselines.drop_steps(config, timeline, past)
    with torch.autocast(q_int.device.type, enabled=False):
        steps = drop_steps(q_int, k_int, beta, timeline, config.threshold)
    if config.depth_tied and layer.below:
        steps = torch.minimum(steps, _below(layer, timeline, past))
    return steps


def _below(layer: Layer, timeline: Timeline, past: Tensor | None) -> Tensor:
    """The drop steps of the layer below for the keys of this one: (B, P + T)."""
    below = layer.below[-1]
    if past is None:
        assert below.drop_step is not None
        return below.drop_step
    assert below.below_steps is not None
    token, steps = below.below_steps  # its slots hold other tokens, in another order
    ours = torch.cat([past, timeline.clock.long()], 1)
    length = int(torch.maximum(token.max(), ours.max())) + 1
    table = torch.full((len(token), length + 1), NEVER, device=token.device)
    # a pad's number is -1: the last column, which nobody reads
    table.scatter_(1, token % (length + 1), steps)
    table[:, length] = NEVER
    return table.gather(1, ours % (length + 1))


def _contains(token: Tensor, dropped: Tensor | None) -> Tensor:
    """Which of the tokens (B, S) are among those dropped (B, S'); -1 is nobody."""
    assert dropped is not None
    return (token[:, :, None] == dropped[:, None, :]).any(-1)


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
