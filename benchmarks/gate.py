"""How much faster is our α-sigmoid than entmax's bisection, and which of them is right?

entmax of the two logits (x, 0) solves  p^(α−1) − (1−p)^(α−1) = (α−1)·x  for its first class,
which is σ_α(x) itself, with no rescaling. Scores are normal with the width 0.6/(α−1) of the
unsaturated range on each side, so nine in ten gates are strictly between 0 and 1. Timed: forward
and backward, including the table for each α.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from entmax import entmax_bisect
from torch import Tensor

from harness import arguments, interleave, ratio, report
from kvprune.ops.alpha_sigmoid import alpha_sigmoid
from kvprune.ops.alpha_sigmoid.table import alpha_table

ALPHAS = (1.5, 4.0, 8.0)


def entmax_gate(x: Tensor, alpha: float) -> Tensor:
    logits = torch.stack([x, torch.zeros_like(x)], dim=-1)  # (N, 2)
    return entmax_bisect(logits, alpha, dim=-1)[..., 0]


def value_and_grad(gate: Callable, x: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    value = gate(x, alpha)
    (grad,) = torch.autograd.grad(value, x, torch.ones_like(x))
    return value.detach(), grad


def table_gate(x: Tensor, alpha: float) -> Tensor:
    # α moves at every training step, so a table is never used twice here
    alpha_table.cache_clear()
    return alpha_sigmoid(x, alpha)


def errors(gate: Callable, x: Tensor, alpha: float) -> tuple[float, float]:
    """The largest error of the value, and of the gradient, against float64."""
    got = value_and_grad(gate, x, alpha)
    want = value_and_grad(lambda x, alpha: alpha_sigmoid(x, alpha, "reference"), x.double(), alpha)
    value, grad = ((g.double() - w).abs().max().item() for g, w in zip(got, want, strict=True))
    return value, grad


def main() -> None:
    args = arguments(__doc__).parse_args()
    count = 1 << 16 if args.sizes == "quick" else 4_000_000
    repeats = 2 if args.sizes == "bench" else 3
    random = torch.Generator().manual_seed(0)
    gates = {"kvprune": table_gate, "entmax": entmax_gate}
    ratios, rows, details = {}, [], {"elements": count, "repeats": repeats}
    for alpha in ALPHAS:
        x = torch.randn(count, generator=random) * (0.6 / (alpha - 1))
        calls = {name: partial(value_and_grad, gate, x, alpha) for name, gate in gates.items()}
        for gate in gates.values():
            value_and_grad(gate, x[: 1 << 16], alpha)  # compiles; all of it would take 10 s
        seconds = interleave(repeats, calls, warmup=0)
        ratios[f"speedup_alpha_{alpha:g}"] = ratio(seconds["entmax"], seconds["kvprune"])
        for name, gate in gates.items():
            value_error, grad_error = errors(gate, x[: 1 << 18], alpha)
            nanoseconds = statistics.median(seconds[name]) / count * 1e9
            rows.append([f"{alpha:g}", name, nanoseconds, value_error, grad_error])
            details[f"{name}_alpha_{alpha:g}"] = {
                "ns_per_score": round(nanoseconds, 2),
                "max_value_error": value_error,
                "max_grad_error": grad_error,
            }
    columns = ["α", "gate", "ns per score", "max error of p", "max error of dp/dx"]
    report(args, ratios, columns, rows, details)


if __name__ == "__main__":
    main()
