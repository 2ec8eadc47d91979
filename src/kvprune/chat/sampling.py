"""Sample the next token from its logits."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.errors import PruneError


class Sampler:
    """Temperature 0 is greedy decoding; otherwise sample from the most likely tokens (top_p)."""

    def __init__(self, temperature: float, top_p: float, seed: int, device: torch.device):
        if temperature < 0:
            raise PruneError(f"temperature={temperature} must be 0 or more; 0 is greedy decoding")
        if not 0 < top_p <= 1:
            raise PruneError(f"top_p={top_p} must be above 0 and at most 1")
        self.temperature, self.top_p = temperature, top_p
        self.random = torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> int:
        """logits: (V,)"""
        if not self.temperature:
            return int(logits.argmax())
        order = (logits.float() / self.temperature).softmax(-1).sort(descending=True)
        # a token stays if those before it do not reach top_p yet: the first always does
        before = order.values.cumsum(-1) - order.values
        probabilities = order.values.where(before < self.top_p, 0.0)
        sampled = torch.multinomial(probabilities, 1, generator=self.random)
        return int(order.indices[sampled])
