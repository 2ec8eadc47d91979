"""Fixed patterns: when a token leaves follows from its position alone."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprune.methods.base import Method, Reading, Step
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from torch import Tensor

    from kvprune.ops.decode import Votes


@dataclass(frozen=True)
class Pattern(Method):
    """A method that says for each position at which later position it is gone."""

    @abstractmethod
    def drop_position(self, position: Tensor) -> Tensor:
        """The position of the first token that no longer sees the token at `position`."""

    def drop_steps(self, reading: Reading) -> Tensor:
        import torch

        timeline = reading.timeline
        clock = timeline.clock.long()
        T = clock.shape[-1]
        position = self.drop_position(reading.token.clamp(min=0))
        # the first query at or after that position; a pad counts as the last real token before it
        reached = clock.cummax(-1).values
        steps = torch.searchsorted(reached.contiguous(), position.contiguous())
        steps = steps.where(steps < T, NEVER)
        return steps.where(timeline.visible_from < NEVER, timeline.index)

    def decode(self, step: Step) -> tuple[Votes | None, Tensor | None]:
        return step.votes, self.drop_position(step.table.members().token) <= step.now[:, None]

    def held(self, context: int, kept: int) -> Tensor:
        import torch

        every = torch.arange(context)
        return every[self.drop_position(every) >= context]
