"""The paper's Fig. attention: who may see whom, dense, local, strided and pruned, as one SVG.

    python -m experiments.attention_patterns            writes docs/figures/patterns.svg

The first three are the baselines' masks. The last is a layer of the small model, fine-tuned to
prune, as it reads a passage of a book that it has never seen.
"""

import torch

from experiments import small
from experiments.publish import DOCS
from kvprune import NEVER, LocalConfig, PruningConfig, StridedConfig

OUT = DOCS / "figures/patterns.svg"
T, FIRST = 52, 3_000  # tokens of the passage, and where it starts
CELL, GAP, TOP = 4.2, 26, 30
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #334155 }
  .seen { fill: #2563eb } .gone { fill: #e2e8f0 }
  @media (prefers-color-scheme: dark) {
    text { fill: #cbd5e1 } .seen { fill: #60a5fa } .gone { fill: #1e293b } }
"""


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    ids = small.held_out()[None, FIRST : FIRST + T]
    at = torch.arange(T)
    panels = {
        "dense": torch.full((T,), NEVER),
        "local, window 12": LocalConfig(12).drop_position(at),
        "strided, stride 8": StridedConfig(8).drop_position(at),
    }
    pruned = small.Runs(args.runs).model(PruningConfig(rank=small.RANK), gamma=1.0)
    steps = pruned.trace(ids)[:, 0]  # (L, T)
    # the layer that prunes about as much as the baselines
    layer = min(range(len(steps)), key=lambda i: abs(gone(steps[i]) - 0.65))
    panels[f"pruned by votes, layer {layer + 1}"] = steps[layer]
    side = T * CELL
    parts = [panel(name, step, i * (side + GAP)) for i, (name, step) in enumerate(panels.items())]
    width = len(panels) * (side + GAP) - GAP
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {side + TOP:.0f}" '
        f'width="{width:.0f}" role="img" aria-label="Which earlier tokens each token sees">'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(svg)
    print(OUT)


def gone(step: torch.Tensor) -> float:
    """Share of the pairs j ≤ k whose j is dropped before k reads."""
    kept = sum(min(int(s), T) - j for j, s in enumerate(step.clamp(max=NEVER)))
    return 1 - kept / (T * (T + 1) / 2)


def panel(name: str, step: torch.Tensor, x: float) -> str:
    """Query k is a row, key j a column: seen while j ≤ k < drop_step[j]."""
    share = gone(step)
    label = name if share < 0.005 else f"{name} ({share:.0%} gone)"
    drawn = [f'<text x="{x:.1f}" y="18">{label}</text>']
    for j, s in enumerate(step.tolist()):
        stop = min(s, T)
        for css, first, last in (("seen", j, stop), ("gone", stop, T)):
            if last > first:
                drawn.append(
                    f'<rect class="{css}" x="{x + j * CELL:.1f}" y="{TOP + first * CELL:.1f}" '
                    f'width="{CELL - 0.6:.1f}" height="{(last - first) * CELL - 0.6:.1f}"/>'
                )
    return "".join(drawn)


if __name__ == "__main__":
    main()
