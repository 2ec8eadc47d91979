"""Scale interaction weights by the inverse of their layer's inputs, so that every layer learns."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvprune.integration.handle import Pruned

log = logging.getLogger(__name__)

# the size of inputs that the initial weights and interaction_lr are designed for
USUAL = 1.0


@torch.no_grad()
def factors(pruned: Pruned, rows: int = 2, tokens: int = 64) -> Tensor:
    """USUAL / the root mean square of each layer's inputs (L,), measured with random tokens.

    A score is a product of two projections of X. The norms of pretrained models shrink X in some
    layers, most of all in the first (GPT-2's and our own by ten and more): the scores there are all
    but β itself, their gradients vanish, and the gates stay open whatever γ. Adam's steps do not
    depend on the size of gradients, so scaling weights and learning rate by this factor is the
    same as scaling the inputs by it.
    """
    sizes: dict[int, Tensor] = {}

    def measure(number: int) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def hook(module: Any, args: tuple[Tensor, ...]) -> None:
            sizes[number] = args[0].float().pow(2).mean().sqrt()

        return hook

    hooks = [
        interaction.register_forward_pre_hook(measure(number))
        for number, interaction in enumerate(pruned.interactions)
    ]
    vocabulary = pruned.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (rows, tokens), generator=generator).to(pruned.model.device)
    try:
        with pruned.evaluating():
            pruned.model.base_model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    measured = torch.tensor([float(sizes[number]) for number in range(len(hooks))])
    # FSDP may give a process empty weights, filled from the first process later
    usable = measured.isfinite() & (measured > 0)
    if not usable.all():
        log.warning("the inputs of layers %s have no size", (~usable).nonzero()[:, 0].tolist())
    return torch.where(usable, USUAL / measured, 1.0)


@torch.no_grad()
def scale(pruned: Pruned, by: Tensor) -> None:
    """Multiply new interaction weights by one factor per layer."""
    for interaction, factor in zip(pruned.interactions, by.tolist(), strict=True):
        assert math.isfinite(factor)
        for linear in (interaction.query, interaction.key):
            linear.weight.mul_(factor)  # type: ignore[union-attr, operator]
