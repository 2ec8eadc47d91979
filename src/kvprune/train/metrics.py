"""Training metrics: sums over the steps since the last log, and throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import TrainerCallback


class StepMetrics(TrainerCallback):
    """Sums up what each step reports, counts steps and tokens, and measures the time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.tokens = 0, 0
        self.seconds_paused = 0.0
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def add(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0) + value.detach()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave this time out of the throughput: evaluation, checkpoints."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds_paused += time.perf_counter() - started

    def means(self, average: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Means per step; `average` takes the mean over processes."""
        return {name: average(total) / max(self.steps, 1) for name, total in self.sums.items()}

    def tokens_per_second(self) -> float:
        """Of this process alone."""
        seconds = time.perf_counter() - self.started - self.seconds_paused
        return self.tokens / max(seconds, 1e-9)


def sparsity_metrics(gate: str, per_layer: Tensor) -> dict[str, float]:
    """The sparsity of the soft or the hard gate, as it is logged: the mean and each layer's."""
    return {
        f"sparsity_{gate}": float(per_layer.mean()),
        **{f"sparsity_{gate}_layer_{i}": float(share) for i, share in enumerate(per_layer)},
    }
