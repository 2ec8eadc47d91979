"""Which γ leads to the sparsity that was asked for: a controller, as a pure state machine.

The plant: sparsity rises with log γ, follows it with a lag, and as α rises the gates stiffen and
hardly move any more; a gate that has closed has no gradient to open again. So the controller
approaches from below: its set point climbs to the target over the first part of the run, and from
there on an integral part removes what error is left. Time is the share of the run that is done, so
that a run of 200 steps and one of 25,000 are steered alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

RAMP = 0.5  # share of the run in which the set point climbs
INTEGRAL = 40.0  # change of log γ for an error of 1 during a whole run
PROPORTIONAL = 6.0  # change of log γ for an error of 1 that appears at once
SLEW = 30.0  # at most so much change of log γ in a whole run's time
LEAST, MOST = 1e-3, 1e2


@dataclass(frozen=True)
class Control:
    """Where the controller is: plain numbers, saved with every checkpoint."""

    gamma: float
    progress: float = 0.0
    error: float = 0.0


def set_point(progress: float, target: float) -> float:
    """The sparsity that is wanted at this point of the run."""
    return target * min(1.0, progress / RAMP)


def adapted(state: Control, measured: float, target: float, progress: float) -> Control:
    """The next state, given the sparsity that was measured.

    log γ += P · (error − last error) + I · error · time,  a PI controller in velocity form: where γ
    stands at a limit there is no hidden sum that could wind up.
    """
    time = max(progress - state.progress, 0.0)
    error = set_point(progress, target) - measured
    change = PROPORTIONAL * (error - state.error) + INTEGRAL * error * time
    change = min(max(change, -SLEW * time), SLEW * time)
    gamma = min(max(state.gamma * math.exp(change), LEAST), MOST)
    return replace(state, gamma=gamma, progress=progress, error=error)
