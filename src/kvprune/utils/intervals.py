"""Intervals of 95 %: how far a measured share or ratio can be off by chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")
Z = 1.959963984540054  # 97.5 % of a normal distribution lie below


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's interval of a share of n independent cases.

        (p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)

    Unlike p ± z √(p(1 − p)/n) it has a width where all cases or none succeed. For a mean of scores
    between 0 and 1 it is wide enough: their variance is at most p(1 − p).
    """
    middle = share + Z * Z / (2 * n)
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    below = 1 + Z * Z / n
    return max(0.0, (middle - half) / below), min(1.0, (middle + half) / below)


def bootstrap(
    cases: Sequence[T], value: Callable[[Sequence[T]], float], rounds: int = 1000, seed: int = 0
) -> tuple[float, float]:
    """Percentiles of `value` over samples of the cases, drawn with replacement."""
    random = Random(seed)
    drawn = (value(random.choices(cases, k=len(cases))) for _ in range(rounds))
    values = sorted(v for v in drawn if math.isfinite(v))
    if not values:
        return math.nan, math.nan
    return values[int(0.025 * len(values))], values[min(int(0.975 * len(values)), len(values) - 1)]
