"""Which γ leads to the sparsity that was asked for: a controller, as a pure state machine.

The plant, as small runs show it: the log-odds of the sparsity rise by about half of log γ, with a
lag that grows as α rises and the gates stiffen. So the error is taken in log-odds, where the gain
is the same at 30 % and at 95 %; the set point moves from where the model starts to the target
while the gates still yield; and an integral part removes what is left. Time is the share of the
run that is done, so that a run of 200 steps and one of 25,000 are steered alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RAMP = 0.4  # share of the run in which the set point moves
INTEGRAL = 20.0  # change of log γ for an error of 1 that lasts the whole run
PROPORTIONAL = 2.0  # change of log γ for an error of 1 that appears at once
SLEW = 60.0  # log γ changes by no more in a whole run's time
LEAST, MOST = 1e-3, 1e3
EDGE = 0.02  # nearer to 0 or 1 the log-odds are mostly noise


@dataclass(frozen=True)
class Control:
    """Where the controller is: plain numbers, saved with every checkpoint."""

    gamma: float
    start: float | None = None  # the first sparsity that was measured
    progress: float = 0.0
    error: float = 0.0


def adapted(state: Control, measured: float, target: float, progress: float) -> Control:
    """The next state, given the sparsity that was measured.

    log γ += P · (error − last error) + I · error · time,  a PI controller in velocity form: where γ
    stands at a limit there is no hidden sum that could wind up.
    """
    start = measured if state.start is None else state.start
    time = max(progress - state.progress, 0.0)
    share = min(1.0, progress / RAMP)
    error = (1 - share) * log_odds(start) + share * log_odds(target) - log_odds(measured)
    change = PROPORTIONAL * (error - state.error) + INTEGRAL * error * time
    change = min(max(change, -SLEW * time), SLEW * time)
    gamma = min(max(state.gamma * math.exp(change), LEAST), MOST)
    return Control(gamma, start, progress, error)


def log_odds(share: float) -> float:
    inside = min(max(share, EDGE), 1 - EDGE)
    return math.log(inside / (1 - inside))
