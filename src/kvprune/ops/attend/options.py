"""What soft attention is given besides tensors to differentiate, and what it remembers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.timeline import Timeline


class Options(NamedTuple):
    """The arguments that are not differentiated."""

    timeline: Timeline
    gate: Gate
    form: AttentionForm  # without its sinks
    block: int  # queries, of the plain version
    backend: str | None
    seed: int  # of dropout


class Forward(NamedTuple):
    """What the backward pass needs to compute the rest again; the first two are the result."""

    out: Tensor  # (B, Hq, T, Dv)
    keep_sum: Tensor  # (B,)
    carries: Tensor  # (blocks or stripes, layers of votes, B, T), log keep before each of them
    lse: Tensor  # (B, Hq, T), the log of what each softmax divides by; empty where unused
