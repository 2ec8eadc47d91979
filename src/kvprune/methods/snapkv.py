"""SnapKV (Li et al., 2024): at the end of a prompt, keep what its last tokens looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvprune.errors import PruneError
from kvprune.methods.base import Method, Reading
from kvprune.ops.never import NEVER
from kvprune.utils.checks import check_number

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SnapKVConfig(Method):
    """Training-free: at the end of a prompt, what its last tokens looked at stays (SnapKV).

    The last `window` tokens of the prompt vote by their attention weights, smoothed over
    neighbouring positions; they stay too. Nothing leaves while the model writes. The original
    chooses per key head; here the heads of a layer share their slots, so the mean decides. A
    prompt that is read in parts is cut to the budget after each part.
    """

    method: ClassVar[str] = "snapkv"
    cuts_prompts: ClassVar[bool] = True
    reversible: ClassVar[bool] = False

    budget: Annotated[int, "how many tokens of the prompt a layer keeps"]
    window: Annotated[int, "how many last tokens of the prompt vote, and stay"] = 32
    kernel: Annotated[int, "how many neighbouring positions share their votes; odd"] = 7

    def __post_init__(self) -> None:
        check_number(self, "window", at_least=1, integer=True)
        check_number(self, "budget", at_least=self.window + 1, integer=True)
        check_number(self, "kernel", at_least=1, integer=True)
        if self.kernel % 2 == 0:
            raise PruneError(f"kernel={self.kernel} must be odd, so that it has a middle")

    def drop_steps(self, reading: Reading) -> Tensor:
        steps = super().drop_steps(reading)
        T = reading.query.shape[2]
        if T == 1:
            return steps  # a token that the model writes, not a prompt
        votes, recent, present = self._votes(reading)
        # what must stay comes first, what is not there comes last
        rank = votes.masked_fill(recent, float("inf")).masked_fill(~present, float("-inf"))
        place = rank.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        return steps.where((place < self.budget) | ~present, T)

    def _votes(self, reading: Reading) -> tuple[Tensor, Tensor, Tensor]:
        """Smoothed votes, which keys are in the window, and which are there at all: (B, P + T)."""
        import torch
        import torch.nn.functional as F

        from kvprune.ops.attend.blocks import at_least_float32, group_heads, softmax_with_sinks

        timeline, form, H = reading.timeline, reading.form, reading.key.shape[1]
        clock = timeline.clock  # (B, T)
        W = min(self.window, clock.shape[1])
        # the last W real queries of each row; pads have the position -1 and sort first
        chosen = clock.argsort(dim=1, stable=True)[:, -W:]  # (B, W)
        _, heads, _, size = reading.query.shape
        q = reading.query.gather(2, chosen[:, None, :, None].expand(-1, heads, -1, size))
        now = clock.gather(1, chosen)  # (B, W)
        logits = at_least_float32(
            torch.matmul(group_heads(q * form.scaling, H), reading.key.transpose(2, 3))
        )
        if form.softcap is not None:
            logits = (logits / form.softcap).tanh() * form.softcap
        sees = now[:, :, None] >= timeline.visible_from[:, None]  # (B, W, P + T)
        sees = sees[:, None].repeat(1, 1, heads // H, 1)  # (B, 1, G·W, P + T)
        weights = softmax_with_sinks(logits.masked_fill(~sees, float("-inf")), form.sinks)
        # a pad sees nothing: its row is NaN and its vote is none
        votes = weights.nan_to_num().sum((1, 2))  # (B, P + T)
        present = timeline.visible_from < NEVER
        # cached keys are in no order: smooth by position, then put back
        order = timeline.visible_from.argsort(dim=1, stable=True)
        by_position = votes.masked_fill(~present, 0.0).gather(1, order)
        smooth = F.avg_pool1d(by_position[:, None], self.kernel, 1, self.kernel // 2)[:, 0]
        votes = torch.empty_like(votes).scatter_(1, order, smooth)
        last = clock.amax(1, keepdim=True)
        recent = present & (last - timeline.visible_from < self.window)
        return votes, recent, present

    @classmethod
    def with_budget(cls, kept: int, context: int) -> SnapKVConfig:
        budget = max(kept, 2)
        return cls(budget, window=min(32, budget // 2))
