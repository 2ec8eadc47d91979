"""The paper's baselines as drop steps: fixed patterns, known before anything is read."""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.config import DenseConfig, LocalConfig, StridedConfig
from kvprune.ops.timeline import NEVER, Timeline

BaselineConfig = DenseConfig | LocalConfig | StridedConfig


def drop_position(config: BaselineConfig, position: Tensor) -> Tensor:
    """The position of the first token that no longer sees the token at `position`.

    local:    j leaves with token j + window
    strided:  j leaves with the first token of the next block, unless j is the last of its own
    """
    if isinstance(config, LocalConfig):
        return position + config.window
    if isinstance(config, StridedConfig):
        next_block = (position // config.stride + 1) * config.stride
        return next_block.where(position + 1 < next_block, NEVER)
    return torch.full_like(position, NEVER)


def drop_steps(config: BaselineConfig, timeline: Timeline) -> Tensor:
    """The same as an index into the row, NEVER past its end: (B, T)."""
    clock = timeline.clock
    T = clock.shape[-1]
    position = drop_position(config, clock.clamp(min=0).long())
    if not timeline.padded:
        return position.where(position < T, NEVER)
    # the token at position p is the first with p + 1 real tokens up to and including it
    seen = (clock >= 0).cumsum(-1)
    steps = torch.searchsorted(seen, position + 1)
    steps = steps.where(steps < T, NEVER)
    return steps.where(clock >= 0, torch.arange(T, device=clock.device))
