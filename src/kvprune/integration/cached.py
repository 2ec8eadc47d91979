"""Attention with a cache: read a prompt, decode one token, follow a policy of others."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.cache.layer import PrunedLayer, Trace
from kvprune.cache.slots import Slots
from kvprune.config import H2OConfig, PruningConfig, TovaConfig
from kvprune.errors import PruneError
from kvprune.integration.deciding import decide, interact
from kvprune.integration.layer import Form, Layer, protection
from kvprune.methods import baselines, policies
from kvprune.ops.attend.hard import hard_attention
from kvprune.ops.decode import NewToken, Votes
from kvprune.ops.decode import decode as decode_step
from kvprune.ops.keep.drop import kept_pairs
from kvprune.ops.timeline import NEVER, Timeline, make_timeline

# a threshold that nobody's score is under; not -inf, as the kernel's fast maths knows no Inf
NOBODY = torch.finfo(torch.float32).min


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
    out = hard_attention(query, key, value, steps, form.attention)
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
    now = timeline.now
    votes, also_drop = None, None
    assert not isinstance(config, TovaConfig | H2OConfig), "they go through follow"
    if layer.interaction is not None:
        q_int, k_int, beta = interact(layer, hidden)
        # with every gate open no score is low enough, but the table stores k_int all the same
        votes = Votes(q_int[:, 0], k_int[:, 0], beta, NOBODY)
    if isinstance(config, PruningConfig):
        assert votes is not None
        votes = votes._replace(
            threshold=config.threshold,
            protect_first=config.protect_first,
            protect_recent=config.protect_recent,
        )
        if config.depth_tied and layer.below:
            also_drop = _contains(table.get().token, layer.below[-1].dropped)
    else:
        also_drop = baselines.drop_position(config, table.get().token) <= now[:, None]
    new = NewToken(query, key, value, now, timeline.active)
    done = decode_step(
        table, new, form.attention, votes=votes, also_drop=also_drop, backend=backend
    )
    store.seen += 1
    layer.dropped = done.dropped
    if store.trace is not None:
        store.trace.note(done.dropped, now[:, None], int(now.max()) + 1)
    layer.record_decode(table, timeline)
    return done.output


@torch.no_grad()
def follow(
    layer: Layer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    form: Form,
    store: PrunedLayer | None,
    backend: str | None,
) -> Tensor:
    """A policy that judges by attention: one token at a time, and over the budget one leaves."""
    config, (B, _, T, _) = layer.settings.config, query.shape
    assert isinstance(config, TovaConfig | H2OConfig)
    if (
        form.training
        or form.attention.sinks is not None
        or (store is not None and store.record_past)
    ):
        raise PruneError(
            f"{type(config).__name__} works in eval mode, on attention without sinks, and cannot "
            f"take tokens back; use another configuration for this"
        )
    if store is None:
        store = PrunedLayer(0, policies.columns(config))
    table = store.begin(key, value)
    start: Tensor | int = store.seen
    if mask is not None:
        start = mask[:, : mask.shape[1] - T].sum(-1)
        mask = mask[:, mask.shape[1] - T :].bool()
    timeline = make_timeline(mask, (B, T), query.device, start=start)
    trace, kept, outs = Trace(), torch.zeros(B, dtype=torch.long, device=query.device), []
    for t in range(T):
        now = timeline.clock[:, t].long()
        active = now >= 0
        extra = {name: key.new_zeros(B, 1, dtype=torch.float32) for name in table.extra}
        new = NewToken(
            query[:, :, t : t + 1], key[:, :, t : t + 1], value[:, :, t : t + 1],
            now.clamp(min=0), active if timeline.padded else None, extra,
        )  # fmt: skip
        done = decode_step(table, new, form.attention, weights=True, backend=backend)
        outs.append(done.output)
        kept += (table.kept - 1) * active
        assert done.weights is not None
        gone = policies.evict(config, table, done.weights, now)
        trace.note(gone, now[:, None] + 1, int(now.max()) + 1)
        if store.trace is not None:
            store.trace.note(gone, now[:, None] + 1, int(now.max()) + 1)
    store.seen += T
    layer.record(kept, timeline, form.training, _as_index(trace.step, timeline, T))
    return torch.cat(outs, 2)


def _contains(token: Tensor, dropped: Tensor | None) -> Tensor:
    """Which of the tokens (B, S) are among those dropped (B, S'); -1 is nobody."""
    assert dropped is not None
    return (token[:, :, None] == dropped[:, None, :]).any(-1)


def _as_index(step: Tensor, timeline: Timeline, length: int) -> Tensor:
    """Drop steps by position as drop steps by index of this pass's tokens: (B, T)."""
    clock = timeline.clock.long().cpu()
    reached = clock.cummax(-1).values.contiguous()
    own = step.gather(1, clock.clamp(min=0))
    index = torch.searchsorted(reached, own)
    index = index.where(index < length, NEVER)
    return index.where(clock >= 0, torch.arange(length)).to(timeline.clock.device)
