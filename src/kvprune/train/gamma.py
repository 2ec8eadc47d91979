"""Which γ leads to the target sparsity: a PI controller, as a pure function of its state.

Small runs show how the model responds: the log-odds of the sparsity rise by about half of log γ,
with a lag that grows as α rises and the gates stiffen. So the error is measured in log-odds, where
the gain is the same at 30 % and at 95 %; the set point moves from the initial sparsity to the
target while the gates still respond; and an integral term removes the remaining error. Time is the
share of the run that is done, so that 200 steps and 25,000 are controlled alike. In a run of fewer
steps the gates, which move with the optimizer, cannot follow: there γ is bounded by steps too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from kvprune.train.alpha import progress
from kvprune.train.evaluation import SparsityProbe

RAMP = 0.4  # share of the run in which the set point moves
INTEGRAL = 20.0  # change of log γ for an error of 1 that lasts the entire run
PROPORTIONAL = 2.0  # change of log γ for an error of 1 that appears at once
SLEW = 60.0  # largest change of log γ, per run
STEP_SLEW = 0.3  # and per optimizer step: the tighter of the two in runs of less than 200 steps
# a sparsity loss of ten times a usual language loss: Adam divides by the size of the gradient, so
# more would change no update, and only take longer to come down from
MIN_GAMMA, MAX_GAMMA = 1e-3, 30.0
EDGE = 0.02  # closer to 0 or 1 the log-odds are mostly noise


@dataclass(frozen=True)
class GammaState:
    """The controller's state: plain numbers, saved with every checkpoint."""

    gamma: float
    start: float | None = None  # the first sparsity that was measured
    progress: float = 0.0
    error: float = 0.0
    step: int = 0  # of the last measurement


class GammaControl(TrainerCallback):
    """γ of the loss: constant, or adapted to a target after each probe.

    Added after the probe, so that it runs after it. `agree` returns the first process's numbers on
    all of them: processes whose rounding differs must not drift apart.
    """

    def __init__(
        self,
        gamma: float,
        target: float | None,
        probe: SparsityProbe,
        agree: Callable[[Tensor], Tensor],
    ):
        self.constant, self.target = gamma, target
        self.probe, self.agree = probe, agree
        self.state = GammaState(gamma)

    @property
    def value(self) -> float:
        return self.constant if self.target is None else self.state.gamma

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        sparsity = self.probe.sparsity
        if self.target is None or sparsity is None or self.probe.step != state.global_step:
            return
        after = next_state(
            self.state, sparsity.total, self.target, progress(state), state.global_step
        )
        gamma = self.agree(torch.tensor([after.gamma], dtype=torch.float64))
        self.state = replace(after, gamma=float(gamma))


def next_state(
    state: GammaState, measured: float, target: float, progress: float, step: int
) -> GammaState:
    """The controller after it has measured a sparsity.

    log γ += P · (error − last error) + I · error · time,  a PI controller in velocity form: where γ
    is at a limit there is no hidden sum that could wind up. A γ that begins above the limit can
    only fall.
    """
    start = measured if state.start is None else state.start
    time = max(progress - state.progress, 0.0)
    share = min(1.0, progress / RAMP)
    error = (1 - share) * log_odds(start) + share * log_odds(target) - log_odds(measured)
    change = PROPORTIONAL * (error - state.error) + INTEGRAL * error * time
    most = min(SLEW * time, STEP_SLEW * max(step - state.step, 0))
    change = min(max(change, -most), most)
    limit = max(MAX_GAMMA, state.gamma)
    gamma = min(max(state.gamma * math.exp(change), MIN_GAMMA), limit)
    return GammaState(gamma, start, progress, error, step)


def log_odds(share: float) -> float:
    inside = min(max(share, EDGE), 1 - EDGE)
    return math.log(inside / (1 - inside))
