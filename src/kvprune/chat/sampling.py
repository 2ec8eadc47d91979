"""Sample the next token from its logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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

    def state(self) -> dict[str, Any]:
        """All that decides what it draws next, in plain values."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "device": self.random.device.type,
            "random": self.random.get_state().numpy().tobytes().hex(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device) -> Sampler:
        """One that goes on from what `state` gave."""
        try:
            sampler = cls(state["temperature"], state["top_p"], 0, device)
            if state["device"] == device.type:
                numbers = bytearray.fromhex(state["random"])
                sampler.random.set_state(torch.frombuffer(numbers, dtype=torch.uint8))
            elif sampler.temperature:
                raise PruneError(
                    f"it samples with the random numbers of {state['device']}, but the model is on "
                    f"{device.type}; use --device {state['device']}"
                )
        except PruneError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise PruneError(f"the state of its sampling is damaged: {error}") from error
        return sampler

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
