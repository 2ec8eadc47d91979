"""The slowest obvious version of everything: plain loops, straight from the paper's equations.

Nothing here is shared with the package, so that agreement means something. Tensors are built by
stacking scalars, in the dtype given, and autograd through them gives exact gradients.
"""

import math

import torch
from torch import Tensor

NEVER = 2**31 - 1


def alpha_sigmoid(x: float, alpha: float) -> float:
    """The p in [0, 1] that solves p^(α−1) − (1−p)^(α−1) = (α−1)x, by bisection."""
    if alpha == math.inf:
        return 1.0 if x > 0 else 0.0
    if x > 0:
        # a p near 1 has only 1e-16 of resolution left, its mirror image near 0 has all
        return 1.0 - alpha_sigmoid(-x, alpha)
    if alpha == 1:
        return math.exp(x) / (1 + math.exp(x))
    if (alpha - 1) * x <= -1:
        return 0.0
    low, high = 0.0, 1.0
    for _ in range(200):
        p = (low + high) / 2
        # both powers minus 1, which cancels in the difference and matters where α is close to 1
        if p == 1:
            left = math.inf
        else:
            power = math.expm1((alpha - 1) * math.log(p))
            left = power - math.expm1((alpha - 1) * math.log1p(-p))
        if left < (alpha - 1) * x:
            low = p
        else:
            high = p
    return (low + high) / 2


def alpha_sigmoid_slope(x: float, alpha: float) -> float:
    """dp/dx = 1 / (p^(α−2) + (1−p)^(α−2)), and 0 where p is 0 or 1."""
    p = alpha_sigmoid(-abs(x), alpha)
    if p == 0 or alpha == math.inf:
        return 0.0
    return 1 / (p ** (alpha - 2) + (1 - p) ** (alpha - 2))


class _AlphaSigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, alpha: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.alpha = alpha
        return _each(x, lambda value: alpha_sigmoid(value, alpha))

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        return grad * _each(x, lambda value: alpha_sigmoid_slope(value, ctx.alpha)), None


def _each(x: Tensor, function) -> Tensor:
    values = [function(value) for value in x.flatten().tolist()]
    return torch.tensor(values, dtype=x.dtype, device=x.device).reshape(x.shape)


def gate(x: Tensor, alpha: float, kind: str = "alpha") -> Tensor:
    """One vote in [0, 1] a score: σ_α(x), or σ(α·x) for kind "temperature"."""
    if kind == "alpha":
        return _AlphaSigmoid.apply(x, alpha)
    if kind == "temperature":
        return (x > 0).to(x.dtype) if alpha == math.inf else torch.sigmoid(alpha * x)
    raise ValueError(kind)


def positions(real: Tensor) -> list[list[int]]:
    """How many real tokens precede each place of a row; real: (B, T)."""
    return [[sum(row[:t]) for t in range(len(row))] for row in real.tolist()]


def soft_keep(
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor | float,
    alpha: float,
    real: Tensor | None = None,
    protect_first: int = 0,
    protect_recent: int = 0,
    kind: str = "alpha",
) -> Tensor:
    """keep[k, j] = Π_{i=j+1..k} gate(s[i, j]), 1 on the diagonal, 0 above it.

    q_int, k_int: (B, T, R); s[k, j] = q_int[k]·k_int[j] / √R + β; out: (B, T, T).
    A pad never votes and is never visible, but sees itself.
    """

    def vote(s: Tensor) -> Tensor:
        return gate(s, alpha, kind)

    return _keep(q_int, k_int, beta, vote, real, protect_first, protect_recent)


def hard_keep(
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor | float,
    threshold: float = 0.0,
    real: Tensor | None = None,
    protect_first: int = 0,
    protect_recent: int = 0,
) -> Tensor:
    """`soft_keep` with the step function for a gate: a vote is to keep iff s > threshold."""

    def vote(s: Tensor) -> Tensor:
        return (s > threshold).to(s.dtype)

    return _keep(q_int, k_int, beta, vote, real, protect_first, protect_recent)


def _keep(q_int, k_int, beta, gate_of, real, protect_first, protect_recent) -> Tensor:
    B, T, _ = q_int.shape
    real = _all_real(B, T) if real is None else real
    zero, one = q_int.new_zeros(()), q_int.new_ones(())
    keeps = []
    for b in range(B):
        votes = {}
        for j in range(T):
            for i in _voters(real[b], j, protect_first, protect_recent):
                votes[i, j] = gate_of(_score(q_int[b, i], k_int[b, j], beta))
        for k in range(T):
            for j in range(T):
                keep = one
                if j > k or (j < k and not (real[b, k] and real[b, j])):
                    keep = zero
                for i in range(j + 1, k + 1):
                    if (i, j) in votes:
                        keep = keep * votes[i, j]
                keeps.append(keep)
    return torch.stack(keeps).reshape(B, T, T)


def drop_step(
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor | float,
    threshold: float = 0.0,
    real: Tensor | None = None,
    protect_first: int = 0,
    protect_recent: int = 0,
) -> Tensor:
    """min{ i > j : i votes to drop j } as the place of i in its row, NEVER if none: (B, T).

    Token j is visible to a real k iff j ≤ k < drop_step[j]. A pad's is its own place.
    """
    B, T, _ = q_int.shape
    real = _all_real(B, T) if real is None else real
    steps = torch.full((B, T), NEVER)
    for b in range(B):
        for j in range(T):
            if not real[b, j]:
                steps[b, j] = j
                continue
            for i in _voters(real[b], j, protect_first, protect_recent):
                if not _score(q_int[b, i], k_int[b, j], beta) > threshold:
                    steps[b, j] = i
                    break
    return steps


def _voters(real: Tensor, j: int, protect_first: int, protect_recent: int) -> list[int]:
    """The tokens i > j whose vote on token j counts; real: (T,)."""
    position = positions(real[None])[0]
    if not real[j] or position[j] < protect_first:
        return []
    return [
        i for i in range(j + 1, len(real)) if real[i] and position[i] - position[j] > protect_recent
    ]


def _score(query: Tensor, key: Tensor, beta: Tensor | float) -> Tensor:
    return (query * key).sum() / math.sqrt(len(query)) + beta


def _all_real(B: int, T: int) -> Tensor:
    return torch.ones(B, T, dtype=torch.bool)


def depth_tied(keeps: list[Tensor]) -> list[Tensor]:
    """Π_{p ≤ ℓ} keep of layer p: what one layer drops is dropped in all later ones."""
    tied: list[Tensor] = []
    for keep in keeps:
        tied.append(tied[-1] * keep if tied else keep)
    return tied


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: Tensor,
    scaling: float,
    softcap: float | None = None,
) -> Tensor:
    """softmax(q·k·scaling + log keep) v: (B, T, H, D).

    q: (B, H, T, D), k and v: (B, Hkv, T, D), keep: (B, T, T); query head h reads key head
    h // (H / Hkv). exp(l + log keep) is written keep · exp(l), over the keys with keep > 0.
    """
    B, H, T, _ = q.shape
    group = H // k.shape[1]
    outputs = []
    for b in range(B):
        for t in range(T):
            for h in range(H):
                seen = [j for j in range(t + 1) if keep[b, t, j] > 0]
                logits = [(q[b, h, t] * k[b, h // group, j]).sum() * scaling for j in seen]
                if softcap is not None:
                    logits = [softcap * torch.tanh(logit / softcap) for logit in logits]
                highest = max(logit.item() for logit in logits)
                weights = [
                    keep[b, t, j] * (logit - highest).exp()
                    for j, logit in zip(seen, logits, strict=True)
                ]
                output = sum(
                    weight * v[b, h // group, j] for j, weight in zip(seen, weights, strict=True)
                )
                outputs.append(output / sum(weights))
    return torch.stack(outputs).reshape(B, T, H, -1)


def sparsity_loss(keeps: list[Tensor], real: Tensor | None = None) -> Tensor:
    """The mean of keep over all layers and pairs j < k of real tokens, γ left out.

    For one row without pads: 2 / (L n (n−1)) Σ_{ℓ, j<k} keep. 0 where there are no pairs.
    """
    pairs = [keep[pair] for keep in keeps for pair in _pairs(keep, real)]
    return torch.stack(pairs).sum() / len(pairs) if pairs else keeps[0].new_zeros(())


def sparsity(keeps: list[Tensor], real: Tensor | None = None) -> list[float]:
    """The share of pairs j < k of real tokens that are dropped (keep is 0), by layer."""
    shares = []
    for keep in keeps:
        pairs = _pairs(keep, real)
        dropped = sum(1 for pair in pairs if keep[pair] == 0)
        shares.append(dropped / len(pairs) if pairs else 0.0)
    return shares


def _pairs(keep: Tensor, real: Tensor | None) -> list[tuple[int, int, int]]:
    B, T, _ = keep.shape
    real = _all_real(B, T) if real is None else real
    return [
        (b, k, j) for b in range(B) for k in range(T) for j in range(k) if real[b, k] and real[b, j]
    ]


def local_keep(T: int, window: int, real: Tensor | None = None) -> Tensor:
    """Each token sees the previous `window` tokens, itself among them: (B, T, T)."""
    return _pattern(T, real, lambda k, j: k - j < window)


def strided_keep(T: int, stride: int, real: Tensor | None = None) -> Tensor:
    """Each token sees its own block of `stride` tokens and the last token of each earlier one."""
    return _pattern(T, real, lambda k, j: k // stride == j // stride or j % stride == stride - 1)


def _pattern(T: int, real: Tensor | None, sees) -> Tensor:
    real = _all_real(1, T) if real is None else real
    B = len(real)
    position = positions(real)
    keep = torch.zeros(B, T, T, dtype=torch.float64)
    for b in range(B):
        for k in range(T):
            keep[b, k, k] = 1
            for j in range(k):
                if real[b, k] and real[b, j] and sees(position[b][k], position[b][j]):
                    keep[b, k, j] = 1
    return keep
