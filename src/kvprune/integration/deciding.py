"""Who is dropped when: by votes, or by a fixed pattern."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.config import H2OConfig, PruningConfig, TovaConfig
from kvprune.integration.layer import Layer
from kvprune.methods import baselines
from kvprune.ops.keep.drop import drop_steps
from kvprune.ops.timeline import NEVER, Timeline


def interact(layer: Layer, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q_int / √r, k_int, β; of no width for a baseline, which does not vote."""
    if layer.interaction is not None:
        made: tuple[Tensor, Tensor, Tensor] = layer.interaction(hidden)
        return made
    nothing = hidden.new_empty(*hidden.shape[:2], 0, dtype=torch.float32)
    return nothing, nothing, nothing.new_zeros(())


def decide(
    layer: Layer,
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor,
    timeline: Timeline,
    past: Tensor | None = None,
) -> Tensor:
    """The drop step of every key in this layer: (B, P + T); past: (B, P), their token numbers."""
    config = layer.settings.config
    assert not isinstance(config, TovaConfig | H2OConfig), "they decide as they attend"
    if not isinstance(config, PruningConfig):
        return baselines.drop_steps(config, timeline, past)
    with torch.autocast(q_int.device.type, enabled=False):
        steps = drop_steps(q_int, k_int, beta, timeline, config.threshold)
    if config.depth_tied and layer.below:
        steps = torch.minimum(steps, _below(layer, timeline, past))
    return steps


def _below(layer: Layer, timeline: Timeline, past: Tensor | None) -> Tensor:
    """The drop steps of the layer below for the keys of this one: (B, P + T)."""
    below = layer.below[-1]
    if past is None:
        assert below.drop_step is not None
        return below.drop_step
    assert below.below_steps is not None
    token, steps = below.below_steps  # its slots hold other tokens, in another order
    ours = torch.cat([past, timeline.clock.long()], 1)
    length = int(torch.maximum(token.max(), ours.max())) + 1
    table = torch.full((len(token), length + 1), NEVER, device=token.device)
    # a pad's number is -1: the last column, which nobody reads
    table.scatter_(1, token % (length + 1), steps)
    table[:, length] = NEVER
    return table.gather(1, ours % (length + 1))
