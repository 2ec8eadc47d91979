"""One token, many rows: vote, drop, attend, insert. Plain torch, any device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvprune.cache.slots import Slots, SlotTable


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
    table: SlotTable,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    token: Tensor,
    *,
    scaling: float,
    votes: Votes | None = None,
    softcap: float | None = None,
    active: Tensor | None = None,
    also_drop: Tensor | None = None,
    weights: bool = False,
    extra: Mapping[str, Tensor] | None = None,
) -> Decoded:
    """The losers leave for good, then the new token attends to the survivors and to itself.

    s[j] = q_int·k_int[j] + β;  slot j is dropped iff s[j] ≤ threshold;
    output = softmax over survivors and self of (q·k·scaling) v.

    A row that is not `active` (a pad, a finished sequence) changes nothing in the table and
    gets its own value back. `also_drop` (B, S) overrules votes and protection.
    """
    B, Hq = query.shape[:2]  # query: (B, Hq, 1, D), key: (B, H, 1, D), value: (B, H, 1, Dv)
    slots = table.get()
    drop = losers(slots, token, votes, also_drop)  # (B, S)
    if active is not None:
        drop &= active[:, None]
    dropped = slots.token.where(drop, -1)
    if votes is not None or also_drop is not None:
        table.remove(drop)
    key_int = None if votes is None else votes.key_int[:, None]
    valid = None if active is None else active[:, None]
    table.push(key, value, key_int, token[:, None], valid, **(extra or {}))

    # the G query heads that share a key head become G queries: nothing is repeated
    slots = table.get()
    grouped = query.reshape(B, key.shape[1], -1, query.shape[-1]).to(slots.keys.dtype)
    if weights or softcap is not None:
        out, p = attend(grouped, slots, scaling, softcap)
    else:
        out, p = (
            scaled_dot_product_attention(
                grouped, slots.keys, slots.values, slots.valid[:, None, None], scale=scaling
            ),
            None,
        )
    if active is not None:
        out = out.where(active[:, None, None, None], value)
        p = None if p is None else p.where(active[:, None, None, None], 0.0)
    output = out.reshape(B, Hq, 1, -1).to(query.dtype)
    return Decoded(output, dropped, None if p is None else p.reshape(B, Hq, -1))


def losers(slots: Slots, token: Tensor, votes: Votes | None, also_drop: Tensor | None) -> Tensor:
    """Which slots the new tokens vote out; a distance of `protect_recent` is still protected."""
    drop = torch.zeros_like(slots.valid) if also_drop is None else also_drop & slots.valid
    if votes is None:
        return drop
    score = (slots.key_int @ votes.query_int.float()[:, :, None]).squeeze(2) + votes.beta
    open_to_vote = (slots.token >= votes.protect_first) & (
        token[:, None] - slots.token > votes.protect_recent
    )
    return drop | (slots.valid & open_to_vote & (score <= votes.threshold))  # (B, S)


def attend(
    query: Tensor, slots: Slots, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logit = query.float() @ slots.keys.float().mT * scaling  # (B, H, G, S)
    if softcap is not None:
        logit = (logit / softcap).tanh() * softcap
    p = logit.masked_fill(~slots.valid[:, None, None], -torch.inf).softmax(-1)
    return p @ slots.values.float(), p
