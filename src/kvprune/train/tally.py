"""What the steps since the last log add up to."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor


class Tally:
    """Sums of what each step says of itself, steps, tokens, and a clock."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.tokens = 0, 0
        self.started = time.perf_counter()

    def add(self, parts: dict[str, Tensor]) -> None:
        for name, part in parts.items():
            self.sums[name] = self.sums.get(name, 0) + part.detach()

    def means(self, over_processes: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """Of a step; `over_processes` takes the mean of what each of them has."""
        return {name: over_processes(part) / max(self.steps, 1) for name, part in self.sums.items()}

    def tokens_per_second(self, seconds_off: float) -> float:
        """Of this process; `seconds_off` went by with other things than steps."""
        seconds = time.perf_counter() - self.started - seconds_off
        return self.tokens / max(seconds, 1e-9)


def by_layer(gate: str, sparsity: Tensor) -> dict[str, float]:
    """The numbers of a log: the mean and each layer's, of the soft or the hard gate."""
    return {
        f"sparsity_{gate}": float(sparsity.mean()),
        **{f"sparsity_{gate}_layer_{i}": float(share) for i, share in enumerate(sparsity)},
    }
