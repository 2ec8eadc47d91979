"""A running mean of the trained weights: it has less noise than the last ones, at no rate to decay.

mean += (weights − mean) / min(step, window):  the plain mean of all steps until `window` of them,
then an exponential one that forgets a step after about as many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import TrainerCallback

from kvprune.adapters.save import save
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned
from kvprune.utils.files import write_atomically

FILE = "average.safetensors"  # in every checkpoint of a run with a mean
ADAPTER = "mean"  # a folder beside it: the same as an adapter
STEPS = "steps"


class WeightAverage(TrainerCallback):
    """Follows the weights step by step; the mean is what is evaluated and, at the end, saved."""

    def __init__(self, pruned: Pruned, window: int):
        self.pruned, self.window = pruned, window
        self.steps = 0
        self.mean: dict[str, Tensor] = {}

    def _weights(self) -> Iterable[tuple[str, Tensor]]:
        parameters = self.pruned.model.named_parameters()
        return ((name, p.data) for name, p in parameters if p.requires_grad)

    @torch.no_grad()
    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1
        share = 1 / min(self.steps, self.window)
        for name, weight in self._weights():
            if name not in self.mean:
                # float32, as the small share of a step would vanish in bfloat16
                self.mean[name] = weight.float().clone()
            else:
                self.mean[name].lerp_(weight.float(), share)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the mean as its weights; before the first step, its own."""
        own = {name: weight.clone() for name, weight in self._weights()} if self.mean else {}
        self.apply()
        try:
            yield
        finally:
            for name, weight in self._weights():
                if name in own:
                    weight.copy_(own[name])

    @torch.no_grad()
    def apply(self) -> None:
        for name, weight in self._weights():
            if name in self.mean:
                weight.copy_(self.mean[name])

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self.apply()

    def save(self, folder: Path, as_adapter: bool) -> None:
        """To resume from, and as an adapter to use."""
        if as_adapter:
            with self.applied():
                save(self.pruned, folder / ADAPTER)
        tensors = {name: mean.contiguous() for name, mean in self.mean.items()}
        data = to_bytes({**tensors, STEPS: torch.tensor(self.steps)})
        write_atomically(folder / FILE, data)

    def restore(self, folder: Path) -> None:
        if not (folder / FILE).is_file():
            raise PruneError(
                f"{folder} has no mean of weights: its run had average=0; resume it with that"
            )
        tensors = load_file(folder / FILE)
        self.steps = int(tensors.pop(STEPS))
        self.mean = tensors
