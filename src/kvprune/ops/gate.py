"""A gate: which sigmoid, and how steep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprune.ops.alpha_sigmoid import reference


@dataclass(frozen=True)
class Gate:
    """The vote as a function of its score, in logs: `kind` "alpha" σ_α(x), "temperature" σ(αx)."""

    kind: str
    alpha: float

    def log(self, x: Tensor) -> Tensor:
        """log gate; exactly -∞ where the gate is 0, exactly 0 where it is 1."""
        return F.logsigmoid(self._logit(x)).to(x.dtype)

    def log_slope(self, x: Tensor) -> Tensor:
        """d log gate / dx; 0, not 0/0, where the gate is exactly 0 or 1."""
        logit = self._logit(x)
        if self.kind == "temperature":
            slope = (-logit).sigmoid() * self.alpha
        else:
            slope = (-logit).sigmoid() * reference.logit_slope(logit, self.alpha)
        return slope.clamp(max=torch.finfo(x.dtype).max).to(x.dtype)

    def _logit(self, x: Tensor) -> Tensor:
        if self.kind == "temperature":
            return x.double() * self.alpha
        return reference.logit(x, self.alpha)
