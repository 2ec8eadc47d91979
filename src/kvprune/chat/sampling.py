"""The next token out of its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.errors import PruneError


class Sampler:
    """Temperature 0 takes the likeliest token; else one is drawn among those that make up top_p."""

    def __init__(self, temperature: float, top_p: float, seed: int, device: torch.device):
        if temperature < 0:
            raise PruneError(f"temperature={temperature} must be 0 or more; 0 draws no token")
        if not 0 < top_p <= 1:
            raise PruneError(f"top_p={top_p} must be above 0 and at most 1")
        self.temperature, self.top_p = temperature, top_p
        self.random = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """logits: (V,)"""
        if not self.temperature:
            return int(logits.argmax())
        order = (logits.float() / self.temperature).softmax(-1).sort(descending=True)
        # a token stays if those before it do not make up top_p yet: the first always does
        before = order.values.cumsum(-1) - order.values
        chances = order.values.where(before < self.top_p, 0.0)
        drawn = torch.multinomial(chances, 1, generator=self.random)
        return int(order.indices[drawn])
