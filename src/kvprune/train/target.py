"""Did a run reach its target sparsity?"""

from __future__ import annotations

from kvprune.train.config import TrainConfig

TOLERANCE = 0.02  # of the text: probes of a few rows vary by about as much


def missed_target(config: TrainConfig, measured: dict[str, float]) -> str:
    """By how much the run missed its target, and what to change; empty if it did not.

    `measured`: as evaluate() returns it. A run without a target, or not measured, misses none.
    """
    target, reached = config.target_sparsity, measured.get("eval_sparsity_hard")
    if target is None or reached is None or abs(reached - target) <= TOLERANCE:
        return ""
    gamma = "larger" if reached < target else "smaller"
    return (
        f"the target was missed: {reached:.1%} pruned instead of {target:.1%} after "
        f"{config.steps} steps; train for more steps, or start with a {gamma} gamma than "
        f"{config.gamma:g}"
    )
