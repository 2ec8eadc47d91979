"""The gate, in three panels: α over training, its shapes, and how far keep reaches by β.

    python -m experiments.gate_shapes          writes docs/results/gate_shapes.json and a figure

The paper's Fig. sparse_sigmoid; no training. Right: keep of tokens at a distance, a random model of
GPT-2 small's width reading random normal inputs, α = 1, with He's initialisation as the paper draws
it: N(0, 2/d), scores twice as wide as with ours, N(0, 1/d). The rows hold both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from experiments import small
from experiments.publish import publish, save_figure
from kvprune.methods.interaction import Interaction
from kvprune.ops.alpha_sigmoid import alpha_sigmoid
from kvprune.train.alpha import alpha_at
from kvprune.utils import plot

ALPHAS = (1.0, 1.5, 2.0, 4.0, 8.0)
BETAS = (0.0, 1.0, 2.0, 4.0)
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WIDTH, RANK, T = 768, 64, 512
QUANTILES = (0.1, 0.5, 0.9)
HE, OURS = "He", "ours"


def main() -> None:
    small.arguments(__doc__).parse_args()
    progress = torch.linspace(0, 1, 101)
    alphas = {shape: [alpha_at(float(p), 1.0, 8.0, shape) for p in progress]
              for shape in ("cosine", "linear")}  # fmt: skip
    x = torch.linspace(-2.5, 2.5, 401)
    shapes = {alpha: alpha_sigmoid(x, alpha) for alpha in ALPHAS}
    reach = {(init, beta): keep_by_distance(init, beta) for init in (HE, OURS) for beta in BETAS}
    rows = [
        {
            "init": init,
            "beta": beta,
            "distance": d,
            **{f"keep_{q:.0%}": v for q, v in zip(QUANTILES, values, strict=True)},
        }
        for (init, beta), by in reach.items()
        for d, values in by.items()
    ]
    publish("gate_shapes", {"width": WIDTH, "rank": RANK, "tokens": T, "alpha": 1.0}, rows)
    draw(progress, alphas, x, shapes, {beta: reach[HE, beta] for beta in BETAS})


def keep_by_distance(init: str, beta: float) -> dict[int, list[float]]:
    """Quantiles of keep[k, j] = Π gate[i, j] over j < i ≤ k, by k − j."""
    torch.manual_seed(0)
    interaction = Interaction(WIDTH, RANK, beta, torch.device("cpu"))
    hidden = torch.randn(T, WIDTH)
    with torch.no_grad():
        if init == HE:
            for linear in (interaction.query, interaction.key):
                linear.weight.mul_(2**0.5)
        q, k = hidden @ interaction.query.weight.T, hidden @ interaction.key.weight.T
        log_gate = torch.nn.functional.logsigmoid(q @ k.T / RANK**0.5 + beta)
    past = torch.ones(T, T, dtype=torch.bool).tril(-1)
    keep = log_gate.where(past, 0.0).cumsum(0).exp()
    return {d: keep.diagonal(-d).quantile(torch.tensor(QUANTILES)).tolist() for d in DISTANCES}


def draw(
    progress: Tensor,
    alphas: dict[str, list[float]],
    x: Tensor,
    shapes: dict[float, Tensor],
    reach: dict[float, dict[int, list[float]]],
) -> None:
    figure, axes = plot.panels(["α over a run", "The gate", "keep at the start, α = 1, He"])
    for (name, values), style in zip(alphas.items(), ("-", ":"), strict=True):
        axes[0].plot(progress, values, style, color=plot.COLOURS[1], label=name)
    axes[0].set(xlabel="share of the run", ylabel="α")
    for number, (alpha, y) in enumerate(shapes.items()):
        axes[1].plot(x, y, color=plot.shade(number, len(shapes)), label=f"α = {alpha:g}")
    axes[1].plot(x, (x > 0).float(), "--", color=plot.COLOURS[0], linewidth=1, label="α → ∞")
    axes[1].set(xlabel="score", ylabel="gate")
    for number, (beta, by) in enumerate(reach.items()):
        low, middle, high = zip(*by.values(), strict=True)
        colour = plot.shade(number, len(reach))
        axes[2].plot(list(by), middle, color=colour, label=f"β = {beta:g}")
        axes[2].fill_between(list(by), low, high, color=colour, alpha=0.15)
    axes[2].set(xlabel="distance k − j", ylabel="keep", xscale="log")
    for axis in axes:
        plot.legend(axis)
    save_figure(figure, "gate_shapes")


if __name__ == "__main__":
    main()
