"""How α rises during a run: a pure function of progress, so a resumed run needs no memory."""

from __future__ import annotations

import math
from typing import Any, get_args

from transformers import TrainerCallback, TrainerState

from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned
from kvprune.train.config import Shape, TrainConfig


class AlphaSchedule(TrainerCallback):
    """Sets α of the gate before each step."""

    def __init__(self, pruned: Pruned, config: TrainConfig):
        self.pruned, self.config = pruned, config

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self.apply(state)

    def apply(self, state: TrainerState) -> None:
        self.pruned.alpha = scheduled_alpha(self.config, progress(state))


def progress(state: TrainerState) -> float:
    """The share of the run that is done."""
    return state.global_step / max(state.max_steps, 1)


def scheduled_alpha(config: TrainConfig, progress: float) -> float:
    share = config.alpha_share
    return alpha_at(
        progress / share if share else 1.0,
        config.alpha_start,
        config.alpha_end,
        config.alpha_schedule,
    )


def alpha_at(progress: float, start: float, end: float, shape: Shape = "cosine") -> float:
    """α when the share `progress` of the schedule is done.

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
