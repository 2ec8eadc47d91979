"""How the host model shapes its attention."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class AttentionForm(NamedTuple):
    """logits = softcap · tanh(q·k · scaling / softcap), dropout on the weights."""

    scaling: float
    softcap: float | None = None
    dropout: float = 0.0
    sinks: Tensor | None = None  # (Hq,), logits of a key without a value in every softmax
