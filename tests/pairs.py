"""Pruned attention in plain n × n form, in float64, differentiated by autograd."""

import math

import torch
from torch import Tensor

from kvprune.ops.alpha_sigmoid.reference import log_alpha_sigmoid
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.timeline import Timeline


def log_keep(votes, timeline: Timeline, gate: Gate) -> Tensor:
    """(B, T, T): −∞ where a query does not see a key; a pad sees nothing."""
    now = timeline.clock[:, :, None]
    counts, sees = now >= timeline.votable_from[:, None], now >= timeline.visible_from[:, None]
    total = torch.zeros((), dtype=torch.float64)
    for q_int, k_int, beta in votes:
        scores = q_int @ k_int.mT + beta
        # neither the gate nor its derivative is finite everywhere, and 0 · ∞ is NaN
        x = torch.where(counts, scores, 10.0)
        if gate.kind == "temperature":
            logs = torch.nn.functional.logsigmoid(x * gate.alpha)
        else:
            logs = log_alpha_sigmoid(x, gate.alpha)
        gone = torch.where(counts, logs == -math.inf, False)
        running = torch.where(counts & ~gone, logs, 0.0).cumsum(1)
        total = total + torch.where(gone.cummax(1).values, -math.inf, running)
    return torch.where(sees & (now >= 0), total, -math.inf)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    form: AttentionForm,
    factors: Tensor | None = None,
) -> Tensor:
    """softmax(logits + log keep) v with dropout's factors (B, H, T, T); zeros for pads."""
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT * form.scaling
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    logits = logits + keep[:, None]
    blind = (keep == -math.inf).all(-1)[:, None, :, None]
    logits = torch.where(blind, 0.0, logits)
    if form.sinks is not None:
        column = form.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        logits = torch.cat([logits, column], -1)
    weights = torch.softmax(logits, -1)[..., : k.shape[2]]
    weights = torch.where(blind, 0.0, weights)
    if factors is not None:
        weights = weights * factors
    return weights @ v.repeat_interleave(group, 1)


def keep_sum(keep: Tensor) -> Tensor:
    """The sum of keep over pairs j < k: (B,)."""
    return keep.exp().tril(-1).sum((1, 2))
