"""Gates set by hand, so that an untrained model prunes as much as a benchmark needs."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvprune.integration import host
from kvprune.integration.handle import Pruned
from kvprune.methods.interaction import Interaction
from kvprune.ops.keep.drop import drop_steps, kept_pairs
from kvprune.ops.timeline import make_timeline

Seen = TypeVar("Seen")


@torch.no_grad()
def set_beta(pruned: Pruned, beta: float) -> None:
    """The same β in every layer; with fresh weights, 2.58 drops one slot in 200 per step."""
    for interaction in _interactions(pruned):
        interaction.beta.fill_(beta)


@torch.no_grad()
def steady_votes(pruned: Pruned, ids: Tensor, kept: int) -> None:
    """New interactions that drop about one of `kept` random tokens per step: the size stays.

    Scores become normal with deviation 1, and P(score ≤ 0) = 1/kept determines β. ids: (B, T), a
    short text; the scale of each layer's input is measured on it.
    """
    scales = _look_at_inputs(pruned, ids, lambda _, x: float(x.float().pow(2).mean().sqrt()))
    for scale, interaction in zip(scales, _interactions(pruned), strict=True):
        for weight in (interaction.query.weight, interaction.key.weight):
            weight.normal_(std=1 / (scale * weight.shape[1] ** 0.5))
    set_beta(pruned, -statistics.NormalDist().inv_cdf(1 / max(kept, 2)))


@torch.no_grad()
def aim(pruned: Pruned, ids: Tensor, sparsity: float) -> None:
    """Find the β, one for all layers, at which this share of the pairs is dropped, by bisection.

    Leaves the model in eval mode.
    """
    pruned.model.eval()
    low, high = -20.0, 20.0
    for _ in range(20 if sparsity else 1):
        middle = (low + high) / 2 if sparsity else 20.0
        set_beta(pruned, middle)
        pruned.model(ids, use_cache=False)
        low, high = (middle, high) if pruned.sparsity().total > sparsity else (low, middle)


@torch.no_grad()
def aim_by_layer(pruned: Pruned, ids: Tensor, sparsity: float) -> None:
    """Find a β for each layer at which about this share of the pairs is dropped, in one pass.

    Inputs of later layers change a little with the β of earlier ones, which is neglected: at 8,192
    tokens a pass takes half a minute.
    """
    B, T = ids.shape
    timeline = make_timeline(None, (B, T), ids.device)
    interactions = _interactions(pruned)
    votes = _look_at_inputs(pruned, ids, lambda layer, x: interactions[layer](x)[:2])
    for interaction, (q_int, k_int) in zip(interactions, votes, strict=True):
        low, high = 0.0, 8.0
        for _ in range(7):
            beta = torch.tensor((low + high) / 2)
            kept = kept_pairs(drop_steps(q_int, k_int, beta, timeline, 0.0), timeline)
            dropped = 1 - float(kept.sum() / timeline.pairs().sum())
            low, high = (float(beta), high) if dropped > sparsity else (low, float(beta))
        interaction.beta.fill_((low + high) / 2)


def _interactions(pruned: Pruned) -> list[Interaction]:
    return [part for part in pruned.interactions if isinstance(part, Interaction)]


def _look_at_inputs(pruned: Pruned, ids: Tensor, look: Callable[[int, Tensor], Seen]) -> list[Seen]:
    """look(layer, input) of every pruned attention layer, in one pass over ids."""
    seen: dict[int, Seen] = {}

    def hook_of(layer: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            seen[layer] = look(layer, host.hidden_states(args, kwargs))

        return hook

    hooks = [
        site.module.register_forward_pre_hook(hook_of(layer), with_kwargs=True, prepend=True)
        for layer, site in enumerate(pruned.sites)
    ]
    try:
        pruned.trace(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return [seen[layer] for layer in range(len(hooks))]
