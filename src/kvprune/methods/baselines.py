"""Baselines as drop steps: fixed patterns, known before anything is read."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.config import DenseConfig, LocalConfig, StreamingConfig, StridedConfig
from kvprune.ops.timeline import NEVER, Timeline

BaselineConfig = DenseConfig | LocalConfig | StridedConfig | StreamingConfig


def drop_position(config: BaselineConfig, position: Tensor) -> Tensor:
    """The position of the first token that no longer sees the token at `position`.

    local:    j leaves with token j + window
    strided:  j leaves with the first token of the next block, unless j is the last of its own
    streaming: as local with what the sinks leave of the budget; the sinks stay
    """
    if isinstance(config, LocalConfig):
        return position + config.window
    if isinstance(config, StridedConfig):
        next_block = (position // config.stride + 1) * config.stride
        return next_block.where(position + 1 < next_block, NEVER)
    if isinstance(config, StreamingConfig):
        window = position + (config.budget - config.sinks)
        return window.where(position >= config.sinks, NEVER)
    return torch.full_like(position, NEVER)


def drop_steps(config: BaselineConfig, timeline: Timeline, past: Tensor | None = None) -> Tensor:
    """The same as the index of a query, NEVER past the last: (B, P + T); past: (B, P) positions."""
    clock = timeline.clock.long()
    T = clock.shape[-1]
    token = clock if past is None else torch.cat([past, clock], -1)
    position = drop_position(config, token.clamp(min=0))
    # the first query at or after that position; a pad in between stands where the last real did
    reached = clock.cummax(-1).values
    steps = torch.searchsorted(reached.contiguous(), position.contiguous())
    steps = steps.where(steps < T, NEVER)
    return steps.where(timeline.visible_from < NEVER, timeline.index)
