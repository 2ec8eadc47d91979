"""What one layer does in a forward pass: learn softly, read a prompt, or decode one token."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvprune.cache.layer import PrunedLayer
from kvprune.cache.record import Record
from kvprune.errors import BudgetError, PruneError
from kvprune.integration.forward_pass import ForwardPass, LayerOutcome, Observed
from kvprune.integration.layer import Layer
from kvprune.methods.base import Reading, Step
from kvprune.methods.interaction import Ballot
from kvprune.ops.attend.operator import soft_attention_in_graph
from kvprune.ops.attend.soft import soft_attention
from kvprune.ops.decode import NewToken, Votes
from kvprune.ops.decode import decode as decode_step
from kvprune.ops.decode.table import Slots
from kvprune.ops.form import AttentionForm
from kvprune.ops.hard import hard_attention
from kvprune.ops.keep.drop import kept_pairs
from kvprune.ops.never import NEVER
from kvprune.ops.timeline import Timeline

# a threshold that drops nothing
KEEP_ALL = -math.inf


class Call(NamedTuple):
    """One layer's attention, as the host calls it."""

    layer: Layer
    hidden: Tensor  # (B, T, width), the input of the attention module
    query: Tensor  # (B, Hq, T, D)
    key: Tensor  # (B, H, T, D)
    value: Tensor  # (B, H, T, Dv)
    form: AttentionForm
    training: bool
    cast: Ballot | None = None  # if it is known already

    def ballot(self) -> Ballot | None:
        """What the layer's tokens bring to a vote; None if the method does not learn."""
        if self.cast is not None:
            return self.cast
        interaction = self.layer.interaction
        return None if interaction is None else interaction(self.hidden)


def attend(run: ForwardPass, call: Call, timeline: Timeline) -> Tensor:
    """The output of attention, (B, Hq, T, Dv); votes, drops and cache follow the pass's method."""
    if not run.hard:
        return soft(run, call, timeline)
    store = run.store(call.layer)
    _check(run, call, store)
    try:
        return attend_hard(run, call, timeline, store)
    except BudgetError as error:
        assert run.cache is not None
        raise error.with_rows(run.cache.break_off(run.seen)) from None


def attend_hard(
    run: ForwardPass, call: Call, timeline: Timeline, store: PrunedLayer | None
) -> Tensor:
    if run.method.watches:
        return watch(run, call, timeline, store)
    one = call.query.shape[2] == 1 and call.form.sinks is None
    if store is not None and one and not store.record_past:
        return decode(run, call, timeline, store)
    return read(run, call, timeline, store)


def soft(run: ForwardPass, call: Call, timeline: Timeline) -> Tensor:
    """The training path: the gate is soft, and its sparsity can be differentiated."""
    ballot, number = call.ballot(), call.layer.number
    assert ballot is not None
    votes = [ballot]
    if run.method.ties_layers:
        run.votes.setdefault(number, ballot)
        votes = [run.votes[below] for below in range(number)] + votes
    gate = run.method.soft_gate(run.alpha)
    attention = soft_attention_in_graph if torch.compiler.is_compiling() else soft_attention
    out, kept = attention(call.query, call.key, call.value, votes, timeline, gate, call.form)
    run.leave(call.layer, LayerOutcome(timeline, kept))
    return out


def read(run: ForwardPass, call: Call, timeline: Timeline, store: PrunedLayer | None) -> Tensor:
    """A whole text, or a part of one after what the cache holds; only survivors are stored."""
    method, number, key, value = run.method, call.layer.number, call.key, call.value
    with torch.no_grad():
        ballot, columns = call.ballot(), method.new_columns(key)
        token = timeline.clock.long()
        new_token, new_columns = token, columns
        new_key_int = key.new_empty(*token.shape, 0) if ballot is None else ballot.k_int
        if store is not None:
            store.begin(key, value)
            _show(run, call)
            past = store.past()
            if past.token.shape[1]:
                timeline = timeline.after(past.token, past.valid, method.protection())
                # a free slot still shows the number of a token that left or moved
                token = torch.cat([past.token.where(past.valid, -1), token], 1)
                if ballot is not None:
                    ballot = ballot._replace(k_int=torch.cat([past.key_int, ballot.k_int], 1))
                held = store.past_columns()
                columns = {name: torch.cat([held[name], columns[name]], 1) for name in held}
                key, value = torch.cat([past.keys, key], 2), torch.cat([past.values, value], 2)
        below = run.steps.get(number - 1) if method.ties_layers else None
        reading = Reading(
            timeline, token, call.query, key, call.form, ballot, columns, below, number
        )
        steps = method.drop_steps(reading)
        run.steps[number] = (token, steps)
        T = call.query.shape[2]
        own = steps[:, timeline.past :]
        kept = kept_pairs(steps, timeline)
        run.leave(call.layer, LayerOutcome(timeline, kept, own.where(own < T, NEVER)))
    out = hard_attention(call.query, key, value, steps, call.form)
    if run.observer is not None:
        run.observer(Observed(number, call.query, key, value, call.form, steps, ballot, out))
    if store is not None:
        if store.record is not None:
            _note(store.record, timeline, token, steps)
        real = timeline.clock >= 0
        states = call.key.detach(), call.value.detach(), new_key_int, new_token, real
        store.absorb(Slots(*states), steps, new_columns)
    return out


@torch.no_grad()
def decode(run: ForwardPass, call: Call, timeline: Timeline, store: PrunedLayer) -> Tensor:
    """One token: the losers of the vote leave, it attends to the rest and itself, and is stored."""
    method, number, table = run.method, call.layer.number, store.begin(call.key, call.value)
    if number == 0 and run.cache is not None:
        run.cache.reserve()
    _show(run, call)
    votes, ballot, now = None, call.ballot(), timeline.now
    if ballot is not None:
        # with every gate open no score is low enough, but k_int is stored all the same
        votes = Votes(ballot.q_int[:, 0], ballot.k_int[:, 0], ballot.beta, KEEP_ALL)
    below = run.dropped.get(number - 1) if method.ties_layers else None
    votes, also_drop = method.decode(Step(table, now, votes, below, number))
    new = NewToken(
        call.query, call.key, call.value, now, timeline.active, method.new_columns(call.key)
    )
    backend = run.cache.backend if run.cache is not None else None
    done = decode_step(table, new, call.form, votes=votes, also_drop=also_drop, backend=backend)
    store.seen += 1
    run.dropped[number] = done.dropped
    if store.record is not None:
        store.record.note(done.dropped, now[:, None], int(now.max()) + 1)
    if method.evicts:
        run.leave(call.layer, LayerOutcome(timeline, table.kept - (timeline.clock >= 0).sum(-1)))
        gone = method.evict(table, None, now)
        if store.record is not None:
            store.record.note(gone, now[:, None] + 1, int(now.max()) + 1)
    else:
        run.leave(call.layer, LayerOutcome(timeline, table=table))
    return done.output


@torch.no_grad()
def watch(run: ForwardPass, call: Call, timeline: Timeline, store: PrunedLayer | None) -> Tensor:
    """A method that judges by attention: one token at a time, and over the budget one leaves."""
    method, T = run.method, call.query.shape[2]
    if store is None:
        store = PrunedLayer(columns=method.columns)
    table = store.begin(call.key, call.value)
    _show(run, call)
    backend = run.cache.backend if run.cache is not None else None
    record, outs = Record(), []
    kept = torch.zeros(len(call.query), dtype=torch.long, device=call.query.device)
    for t in range(T):
        at = slice(t, t + 1)
        now = timeline.clock[:, t].long()
        active = now >= 0
        new = NewToken(
            call.query[:, :, at], call.key[:, :, at], call.value[:, :, at], now.clamp(min=0),
            active if timeline.padded else None, method.new_columns(call.key[:, :, at]),
        )  # fmt: skip
        done = decode_step(table, new, call.form, weights=True, backend=backend)
        outs.append(done.output)
        kept += (table.kept - 1) * active
        gone = method.evict(table, done.weights, now)
        for noted in (record, store.record):
            if noted is not None:
                noted.note(gone, now[:, None] + 1, int(now.max()) + 1)
    store.seen += T
    steps = _as_index(record.step, timeline)
    run.leave(call.layer, LayerOutcome(timeline, kept, steps))
    return torch.cat(outs, 2)


def _check(run: ForwardPass, call: Call, store: PrunedLayer | None) -> None:
    method = run.method
    refused = method.watches and (call.training or call.form.sinks is not None)
    if refused or (not method.reversible and store is not None and store.record_past):
        raise PruneError(
            f"{type(method).__name__} works in eval mode, on attention without sinks, and cannot "
            f"take tokens back; use another configuration for this"
        )


def _show(run: ForwardPass, call: Call) -> None:
    """Let the cache's recorder see what comes in."""
    if run.cache is not None and run.cache.recorder is not None:
        run.cache.recorder(call.layer.number, call.key, call.value)


def _note(record: Record, timeline: Timeline, token: Tensor, steps: Tensor) -> None:
    """Write down who left when, by positions."""
    clock = timeline.clock.long()
    gone = (steps < NEVER) & (timeline.visible_from < NEVER)
    # one more column: what leaves after the last token leaves with the next
    later = torch.cat([clock, clock.amax(1, keepdim=True) + 1], 1)
    dropper = later.gather(1, steps.clamp(0, clock.shape[1]))
    record.note(token.where(gone, -1), dropper, int(clock.max()) + 1)


def _as_index(step: Tensor, timeline: Timeline) -> Tensor:
    """Drop steps by position as drop steps by index of this pass's tokens: (B, T)."""
    clock = timeline.clock.long().cpu()
    T = clock.shape[1]
    reached = clock.cummax(-1).values.contiguous()
    index = torch.searchsorted(reached, step.gather(1, clock.clamp(min=0)))
    index = index.where(index < T, NEVER)
    return index.where(clock >= 0, torch.arange(T)).to(timeline.clock.device)
