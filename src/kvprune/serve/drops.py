"""What a client that asked for a report has not been told yet."""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprune.ops.never import NEVER

# (layer, ((position, position of the token that dropped it), ...)), layers with any only
LayerDrops: TypeAlias = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


def fresh_drops(step: Tensor, told: Tensor | None) -> tuple[LayerDrops, Tensor]:
    """The drops of a row that are news, and all that have been told with them.

    step: (L, tokens read), when each token was dropped; told: (L, tokens), which drops are known.
    A row that is read again has told of more tokens than it has read so far.
    """
    gone = step < NEVER
    width = gone.shape[1]
    told = torch.zeros_like(gone) if told is None else told
    told = F.pad(told, (0, max(width - told.shape[1], 0)))
    fresh = gone & ~told[:, :width]
    told[:, :width] |= gone
    layers = []
    for layer in fresh.any(1).nonzero()[:, 0].tolist():
        at = fresh[layer].nonzero()[:, 0]
        pairs = zip(at.tolist(), step[layer, at].tolist(), strict=True)
        layers.append((layer, tuple(pairs)))
    return tuple(layers), told
