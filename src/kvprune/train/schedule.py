"""How α rises during a run: a pure function of progress, so that a resumed run needs no memory."""

from __future__ import annotations

import math
from typing import Literal, get_args

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
