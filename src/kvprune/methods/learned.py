"""The paper's method: each token votes on which earlier tokens its layer keeps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kvprune.errors import PruneError
from kvprune.methods.base import Method, Reading, Step
from kvprune.ops.never import NEVER
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kvprune.methods.interaction import Interaction
    from kvprune.ops.decode import Votes
    from kvprune.ops.gate import Gate
    from kvprune.ops.timeline import Protection


@dataclass(frozen=True)
class PruningConfig(Method):
    """The paper's method, Adaptively Sparse Attention."""

    method: ClassVar[str] = "pruning"
    trainable: ClassVar[bool] = True
    learns: ClassVar[bool] = True
    adjustable: ClassVar[tuple[str, ...]] = ("threshold", "protect_first", "protect_recent")

    rank: Annotated[int, "width r of the interaction queries and keys"] = 64
    beta: Annotated[float, "initial β; positive keeps every token at the start"] = 2.0
    alpha: Annotated[float, "α of the gate in training until another is set"] = 1.0
    gate: Annotated[
        Literal["alpha", "temperature"],
        "gate of training: the α-sigmoid, or the plain sigmoid of α·x (temperature 1/α)",
    ] = "alpha"
    depth_tied: Annotated[bool, "a token dropped in one layer is dropped in all later ones"] = False
    protect_first: Annotated[int, "number of first tokens of a row that are never dropped"] = 0
    protect_recent: Annotated[int, "number of last tokens on which votes do not count"] = 0
    threshold: Annotated[float, "drop where the score is at most this; higher prunes more"] = 0.0

    def __post_init__(self) -> None:
        check_number(self, "rank", at_least=1, integer=True)
        check_number(self, "protect_first", at_least=0, integer=True)
        check_number(self, "protect_recent", at_least=0, integer=True)
        _check_finite(self, "beta")
        _check_finite(self, "threshold")
        check_alpha(self.alpha)
        if self.gate not in ("alpha", "temperature"):
            raise PruneError(f"gate={self.gate!r} is unknown; choose 'alpha' or 'temperature'")

    @property
    def key_int_width(self) -> int:
        return self.rank

    @property
    def start_alpha(self) -> float:
        return self.alpha

    @property
    def ties_layers(self) -> bool:
        return self.depth_tied

    def protection(self) -> Protection:
        from kvprune.ops.timeline import Protection

        return Protection(self.protect_first, self.protect_recent)

    def new_interaction(self, width: int, device: torch.device) -> Interaction:
        from kvprune.methods.interaction import Interaction

        return Interaction(width, self.rank, self.beta, device)

    def soft_gate(self, alpha: float) -> Gate:
        from kvprune.ops.gate import Gate

        return Gate(self.gate, alpha)

    def start_advice(self, alpha: float) -> str:
        """β should be near the score at which the gate saturates, 1 / (α − 1).

        Below, products of votes vanish and the model starts broken; above, every vote is exactly
        1 and none has a gradient.
        """
        if self.gate != "alpha":
            return ""
        limit = saturation(alpha)
        if self.beta > 1.5 * limit:
            return (
                f"β = {self.beta:g} is far above {limit:.3g}, where the gate of α = {alpha:g} is "
                f"exactly 1: hardly a vote has a gradient. Start with α = {1 + 1 / self.beta:.3g}"
            )
        if 0 < self.beta < limit / 1.5:
            return (
                f"at α = {alpha:g} a vote of β = {self.beta:g} is well below 1 and products of "
                f"votes vanish: the model starts broken, which only a long run (the paper: 25,000 "
                f"steps) repairs. For a short one start with α = {1 + 1 / self.beta:.3g}"
            )
        return ""

    def drop_steps(self, reading: Reading) -> Tensor:
        """drop_step[j] = min{ i > j : s[i, j] ≤ threshold }; tied layers take the earliest."""
        import torch

        from kvprune.ops.keep.drop import drop_steps

        assert reading.ballot is not None
        q_int, k_int, beta = reading.ballot
        with torch.autocast(q_int.device.type, enabled=False):
            steps = drop_steps(q_int, k_int, beta, reading.timeline, self.threshold)
        if reading.below is not None:
            steps = torch.minimum(steps, _below(reading.token, *reading.below))
        return steps

    def decode(self, step: Step) -> tuple[Votes | None, Tensor | None]:
        assert step.votes is not None
        query_int, key_int, beta = step.votes[:3]
        votes = type(step.votes)(
            query_int, key_int, beta, self.threshold, self.protect_first, self.protect_recent
        )
        if step.below is None:
            return votes, None
        dropped_below = (step.table.members().token[:, :, None] == step.below[:, None, :]).any(-1)
        return votes, dropped_below


def _below(token: Tensor, token_below: Tensor, steps_below: Tensor) -> Tensor:
    """The drop steps of the layer below, in the order of this layer's keys: (B, P + T).

    Two layers hold different tokens in different slots; a pad's number is -1.
    """
    import torch

    length = int(torch.maximum(token.max(), token_below.max())) + 1
    by_number = torch.full((len(token), length + 1), NEVER, device=token.device)
    # -1 % (length + 1) is the last column, which is for pads and free slots
    by_number.scatter_(1, token_below % (length + 1), steps_below)
    by_number[:, length] = NEVER
    return by_number.gather(1, token % (length + 1))


def saturation(alpha: float) -> float:
    """The score from which a vote of the α-sigmoid is exactly 1, and has no gradient."""
    return math.inf if alpha == 1 else 1 / (alpha - 1)


def check_alpha(alpha: Any) -> float:
    """The number itself, or an error if it is not an α."""
    if not isinstance(alpha, int | float) or not alpha >= 1:
        raise PruneError(f"alpha={alpha!r} must be a number from 1 (sigmoid) to inf (step)")
    return float(alpha)


def _check_finite(config: PruningConfig, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PruneError(f"{name}={value!r} must be a finite number")
