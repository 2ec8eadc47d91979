"""A trace as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas

from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from kvprune.explain.trace import Trace


def to_pandas(trace: Trace) -> pandas.DataFrame:
    """One row per layer and token; drop_step and dropper are missing if it stayed."""
    L, T = trace.drop_step.shape
    step = trace.drop_step.reshape(-1)
    dropped = step < NEVER
    position = np.tile(np.arange(T), L)
    droppers = [trace.tokens[i] if i < T else None for i in step.tolist()]
    return pandas.DataFrame(
        {
            "layer": np.repeat(trace.layers, T),
            "position": position,
            "token": [trace.tokens[i] for i in position],
            "id": np.tile(trace.ids, L),
            "drop_step": pandas.array(step, dtype="Int64").copy(),
            "dropper": droppers,
            "written": position >= trace.prompt,
        }
    ).assign(drop_step=lambda table: table["drop_step"].where(dropped))
