"""Inputs, models and masks that several tests share."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import kvprune
from kvprune.methods.base import Reading
from kvprune.ops.timeline import Timeline


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def real_tokens(B: int, T: int, padding: str) -> Tensor | None:
    """Which tokens are real; padding of all rows but the first: "none", "left" or "right"."""
    if padding == "none":
        return None
    real = torch.ones(B, T, dtype=torch.bool)
    for b in range(1, B):
        pads = min(3 * b, T - 1)
        if padding == "left":
            real[b, :pads] = False
        else:
            real[b, T - pads :] = False
    return real


def uneven_gates(pruned, seed: int = 0, spread: float = 1.5) -> None:
    """Random interactions that drop many tokens in some layers and rows, few in others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for i, interaction in enumerate(pruned.interactions):
            for weight in (interaction.query.weight, interaction.key.weight):
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread / 8)
            interaction.beta.fill_(2.0 + 1.5 * (i % 2))


def randomise_lora(model) -> None:
    """A new LoRA has no effect; give it one."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))


def random_ids(B: int, T: int, seed: int = 0, vocab: int = 101) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (B, T), generator=generator)


def attach_uneven(model, seed: int = 0, **options) -> kvprune.Pruned:
    """Attach with uneven gates; options: fields of PruningConfig."""
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8, **options))
    uneven_gates(pruned, seed)
    return pruned


def position_ids(mask: Tensor) -> Tensor:
    """Positions of the real tokens; not every model derives them from the mask."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def full_logits(model, ids: Tensor, mask: Tensor) -> Tensor:
    """The logits of every position by one forward pass without a cache."""
    positions = position_ids(mask)
    with torch.no_grad():
        return model(
            ids, attention_mask=mask.long(), position_ids=positions, use_cache=False
        ).logits


def visible(drop_step: Tensor) -> Tensor:
    """Query × key: which tokens each token sees, from the drop steps (..., T)."""
    k = torch.arange(drop_step.shape[-1])
    return (k <= k[:, None]) & (k[:, None] < drop_step[..., None, :])


def real_pairs(real: Tensor | None, B: int, T: int) -> Tensor:
    """Query × key: the pairs of two real tokens, (B, T, T)."""
    if real is None:
        return torch.ones(B, T, T, dtype=torch.bool)
    return real[:, :, None] & real[:, None]


def reading(timeline: Timeline) -> Reading:
    """What a method that looks at positions alone needs to know of a text."""
    return Reading(timeline, timeline.clock.long(), None, None, None, None, {}, None)


def in_own_loop(coroutine):
    """`asyncio.run` in a thread: where browser tests have run, this one has a loop already."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
