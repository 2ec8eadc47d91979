"""The α-sigmoid in plain torch, on any device: every kernel is tested against this."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprune.errors import PruneError

# enough for every α: with a = α−1 from 1e-42 to 1e10, five reach the last bits of float64
NEWTON_STEPS = 6


def alpha_sigmoid(x: Tensor, alpha: float) -> Tensor:
    """A sigmoid that reaches 0 and 1, and gets steeper with α.

    p = σ_α(x) solves  p^a − (1−p)^a = a·x  with a = α−1, and
    dp/dx = 1 / (p^(a−1) + (1−p)^(a−1)).
    It is exactly 0 below −1/a and exactly 1 above 1/a; there its gradient is exactly 0.
    """
    score = logit(x.detach(), alpha)
    gate, rest = score.sigmoid(), (-score).sigmoid()
    return _with_slope(x, gate, gate * rest * logit_slope(score, alpha))


def log_alpha_sigmoid(x: Tensor, alpha: float) -> Tensor:
    """log σ_α(x), to full relative precision where the gate is too small for its own dtype.

    Exactly −∞ where the gate is 0, and the gradient σ'/σ is 0 there, not 0/0.
    """
    score = logit(x.detach(), alpha)
    slope = (-score).sigmoid() * logit_slope(score, alpha)
    return _with_slope(x, F.logsigmoid(score), slope)


def temperature_sigmoid(x: Tensor, temperature: float) -> Tensor:
    """σ(x/τ): the gate that the paper compares with; it never reaches 0 or 1."""
    return (_wide(x) / check_temperature(temperature)).sigmoid().to(x.dtype)


def log_temperature_sigmoid(x: Tensor, temperature: float) -> Tensor:
    """log σ(x/τ)."""
    return F.logsigmoid(_wide(x) / check_temperature(temperature)).to(x.dtype)


def logit(x: Tensor, alpha: float) -> Tensor:
    """The t, in float64, whose logistic sigmoid is σ_α(x): ±∞ where the gate is exactly 0 or 1."""
    a = check_alpha(alpha) - 1
    x = x.double()
    if a == 0:
        return x
    if a == math.inf:
        return (x > 0).double().logit().where(~x.isnan(), x)
    size = x.abs()
    distance = solve(a * size, 1 - a * size, a)
    distance = distance.masked_fill(size == 0, 0).masked_fill(
        (size >= 1 / a) | (a * size >= 1), math.inf
    )
    return distance.copysign(x)


def solve(y: Tensor, z: Tensor, a: float) -> Tensor:
    """The t ≥ 0 with  q^a − p^a = y  for p, q = σ(−t), σ(t), where 0 < y = 1−z < 1.

    Newton on  L(t) = a·log(1 + e^−t) − log(1 − e^−at) = −log y.  Both terms of L fall and are
    convex, so a start on the left of the root moves right and never passes it.
    """
    target = -torch.where(y > 0.5, torch.log1p(-z), y.log())
    # three lower bounds of the root: L without its first term, L without its second, and
    # 2·sinh(at/2) = y·(2·cosh(t/2))^a with cosh ≥ 1; one of them is close everywhere
    t = -torch.where(y > 0.5, z.log(), torch.log1p(-y)) / a
    t = torch.maximum(t, -torch.expm1(target / a).log())
    t = torch.maximum(t, 2 / a * torch.asinh(y * 2.0 ** min(a - 1, 500.0)))
    for _ in range(NEWTON_STEPS):
        fade = torch.exp(-a * t)
        # log(1 − e^−at) has two forms; each is exact where the other cancels
        second = torch.where(fade < 0.5, torch.log1p(-fade), (-torch.expm1(-a * t)).log())
        first = a * torch.log1p(torch.exp(-t))
        slope = a * ((-t).sigmoid() + 1 / torch.expm1(a * t))
        t = t + (first - second - target) / slope
    return t


def logit_slope(score: Tensor, alpha: float) -> Tensor:
    """d logit/dx = 1 / (q·p^a + p·q^a) at p, q = σ(score), σ(−score); 0 at exactly 0 and 1."""
    a = alpha - 1
    if a == math.inf:
        return torch.zeros_like(score).where(~score.isnan(), score)
    p, q = score.sigmoid(), (-score).sigmoid()
    slope = 1 / (q * torch.exp(a * F.logsigmoid(score)) + p * torch.exp(a * F.logsigmoid(-score)))
    return slope.masked_fill(score.isinf(), 0)


def check_alpha(alpha: float) -> float:
    """α as a float, or an error."""
    if not alpha >= 1:
        raise PruneError(
            f"alpha is {alpha}, but the α-sigmoid is defined for 1 ≤ α ≤ ∞; "
            f"use 1 for the logistic sigmoid, larger values for a steeper gate, inf for a step"
        )
    return float(alpha)


def check_temperature(temperature: float) -> float:
    """τ as a float, or an error."""
    if not 0 < temperature < math.inf:
        raise PruneError(
            f"temperature is {temperature}, but the gate σ(x/τ) needs 0 < τ < ∞; "
            f"use 1 for the logistic sigmoid, smaller values for a steeper gate"
        )
    return float(temperature)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _ImplicitDerivative(torch.autograd.Function):
    """Returns `value` as a function of x whose derivative is `slope`, both in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        largest = torch.finfo(x.dtype).max
        ctx.save_for_backward(slope.clamp(max=largest).to(x.dtype))
        return value.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


_with_slope: Callable[[Tensor, Tensor, Tensor], Tensor] = _ImplicitDerivative.apply
