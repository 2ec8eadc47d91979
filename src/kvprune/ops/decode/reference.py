"""One token, many rows: vote, drop, attend, insert. Plain torch, any device."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvprune.ops.decode.table import Rows, Slots, Table
from kvprune.ops.form import AttentionForm


class NewToken(NamedTuple):
    """One new token per row."""

    query: Tensor  # (B, Hq, 1, D)
    key: Tensor  # (B, H, 1, D)
    value: Tensor  # (B, H, 1, Dv)
    number: Tensor  # (B,), its position among the row's tokens
    active: Tensor | None = None  # (B,), False for a pad or a finished sequence; None: all are
    extra: Mapping[str, Tensor] = MappingProxyType({})  # (B, 1, ...), for the table's own columns


class Votes(NamedTuple):
    """What the new token of each row brings to the vote on the tokens before it."""

    query_int: Tensor  # (B, R), divided by √r already
    key_int: Tensor  # (B, R), stored with the token for the votes of later ones
    beta: Tensor | float
    threshold: float = 0.0
    protect_first: int = 0
    protect_recent: int = 0


class Decoded(NamedTuple):
    output: Tensor  # (B, Hq, 1, Dv)
    dropped: Tensor  # (B, S), the numbers of the tokens that left in this step, −1 elsewhere
    weights: Tensor | None  # (B, Hq, S), attention over the table's slots as they are now


@torch.no_grad()
def decode(
    table: Table,
    new: NewToken,
    form: AttentionForm,
    *,
    votes: Votes | None = None,
    also_drop: Tensor | None = None,
    weights: bool = False,
) -> Decoded:
    """What is voted out leaves for good, then the new token attends to the survivors and to itself.

    s[j] = q_int·k_int[j] + β;  slot j is dropped iff s[j] ≤ threshold;
    output = softmax over survivors and self of (q·k·scaling) v.

    A row that is not `active` changes nothing in the table and gets its own value back.
    `also_drop` (B, S) overrules votes and protection. Dropout is ignored: a cache is for
    inference.
    """
    query, key, value, number, active, extra = new
    B, Hq = query.shape[:2]
    slots = table.get()
    drop = dropped_slots(slots, number, votes, also_drop)  # (B, S)
    if active is not None:
        drop &= active[:, None]
    dropped = slots.token.where(drop, -1)
    if votes is not None or also_drop is not None:
        table.remove(drop)
    key_int = None if votes is None else votes.key_int[:, None]
    valid = None if active is None else active[:, None]
    table.push(key, value, key_int, number[:, None], valid, **extra)

    # the G query heads that share a key head become G queries: nothing is repeated
    slots = table.get()
    grouped = query.reshape(B, key.shape[1], -1, query.shape[-1]).to(slots.keys.dtype)
    if weights or form.softcap is not None:
        out, p = attend(grouped, slots, form)
    else:
        out, p = (
            scaled_dot_product_attention(
                grouped, slots.keys, slots.values, slots.valid[:, None, None], scale=form.scaling
            ),
            None,
        )
    if active is not None:
        out = out.where(active[:, None, None, None], value)
        p = None if p is None else p.where(active[:, None, None, None], 0.0)
    output = out.reshape(B, Hq, 1, -1).to(query.dtype)
    return Decoded(output, dropped, None if p is None else p.reshape(B, Hq, -1))


def dropped_slots(
    slots: Slots, number: Tensor, votes: Votes | None, also_drop: Tensor | None
) -> Tensor:
    """Which slots the new tokens vote out; a distance of `protect_recent` is still protected."""
    drop = torch.zeros_like(slots.valid) if also_drop is None else also_drop & slots.valid
    if votes is None:
        return drop
    score = (slots.key_int @ votes.query_int.float()[:, :, None]).squeeze(2) + votes.beta
    open_to_vote = (slots.token >= votes.protect_first) & (
        number[:, None] - slots.token > votes.protect_recent
    )
    return drop | (slots.valid & open_to_vote & (score <= votes.threshold))  # (B, S)


def remove(table: Rows, mask: Tensor) -> None:
    """Free the slots of `mask` (B, S): the last tokens of a row that is dense move into them."""
    places, _ = table.prepare(None, room=0)
    for b in range(len(places.kept)):
        columns, n = table.row(b), int(places.kept[b])
        stays = ~mask[b, :n]
        left = int(stays.sum())
        holes = (~stays[:left]).nonzero()[:, 0]
        tail = left + stays[left:].nonzero()[:, 0]
        for column in columns.values():
            column[holes] = column[tail]
        places.kept[b] = left
    table.finish()


def attend(query: Tensor, slots: Slots, form: AttentionForm) -> tuple[Tensor, Tensor]:
    logit = query.float() @ slots.keys.float().mT * form.scaling  # (B, H, G, S)
    if form.softcap is not None:
        logit = (logit / form.softcap).tanh() * form.softcap
    p = logit.masked_fill(~slots.valid[:, None, None], -torch.inf).softmax(-1)
    return p @ slots.values.float(), p
