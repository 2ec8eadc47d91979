"""How α rises during a run: a pure function of progress, so that a resumed run needs no memory."""

from __future__ import annotations

import math
from typing import Literal, get_args

from kvprune.config import PruningConfig
from kvprune.errors import PruneError

Shape = Literal["cosine", "linear", "constant"]


def alpha_at(progress: float, start: float, end: float, shape: Shape = "cosine") -> float:
    """α when the share `progress` of its way is done.

    cosine:  start + (end − start) · (1 − cos π·progress) / 2;  constant: `end` throughout.
    """
    if shape not in get_args(Shape):
        raise PruneError(
            f"schedule {shape!r} is unknown; choose one of {', '.join(get_args(Shape))}"
        )
    done = min(max(progress, 0.0), 1.0)
    if shape == "constant":
        return end
    share = done if shape == "linear" else (1 - math.cos(math.pi * done)) / 2
    return start + (end - start) * share


def saturation(alpha: float) -> float:
    """The score from which a vote of the α-sigmoid is exactly 1, and has no gradient."""
    return math.inf if alpha == 1 else 1 / (alpha - 1)


def advice(alpha: float, config: PruningConfig) -> str:
    """What is wrong with starting at this α with this β, and what to try; empty if nothing is.

    The gate should start where it saturates, β ≈ 1 / (α − 1): below, products of votes vanish and
    the model starts broken; above, every vote is exactly 1 and none has a gradient.
    """
    if config.gate != "alpha":
        return ""
    limit = saturation(alpha)
    if config.beta > 1.5 * limit:
        return (
            f"β = {config.beta:g} lies far above {limit:.3g}, where the gate of α = {alpha:g} is "
            f"exactly 1: hardly a vote has a gradient. Start with α = {1 + 1 / config.beta:.3g}"
        )
    if 0 < config.beta < limit / 1.5:
        return (
            f"at α = {alpha:g} a vote of β = {config.beta:g} is well below 1 and products of votes "
            f"vanish: the model starts broken, which only a long run (the paper: 25,000 steps) "
            f"mends. For a short one start with α = {1 + 1 / config.beta:.3g}"
        )
    return ""
