"""Policies that need no training: over a budget, the token that got the least attention leaves."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.cache.slots import SlotTable
from kvprune.config import Config, H2OConfig, TovaConfig

# H2O's memory: the attention that each token has received, summed over queries and heads
SCORE = "score"


def is_scored(config: Config) -> bool:
    """Whether the policy looks at attention weights, and so must read one token at a time."""
    return isinstance(config, TovaConfig | H2OConfig)


def columns(config: Config) -> dict[str, tuple[int, ...]]:
    """What a slot remembers beside its key and value."""
    return {SCORE: ()} if isinstance(config, H2OConfig) else {}


@torch.no_grad()
def evict(config: TovaConfig | H2OConfig, table: SlotTable, weights: Tensor, now: Tensor) -> Tensor:
    """After a step, bring every row back to its budget; returns who left: (B, S), -1 for nobody.

    weights: (B, Hq, S), the attention of the step; now: (B,), its position.
    TOVA judges by the last query alone, H2O by all so far; H2O keeps half of its budget for the
    most recent tokens.
    """
    slots = table.get()
    score = weights.mean(1)
    safe = torch.zeros_like(slots.valid)
    if isinstance(config, H2OConfig):
        column = table.columns[SCORE][:, : table.width]
        column += weights.sum(1)
        score = column
        safe = now[:, None] - slots.token < config.budget - config.budget // 2
    over = slots.valid.sum(1) - config.budget  # one token came in, so at most one must leave
    least = score.masked_fill(~slots.valid | safe, torch.inf).argmin(1, keepdim=True)
    leaves = torch.zeros_like(slots.valid).scatter_(1, least, (over > 0)[:, None])
    gone = slots.token.where(leaves, -1)
    table.remove(leaves)
    return gone
