"""The numbers of a trace in a few lines, for programs and for the terminal."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvprune.explain.cost import Miss
from kvprune.explain.trace import Trace


def summary(trace: Trace) -> dict[str, Any]:
    """How much was dropped, at what cost, and which tokens suffered most."""
    at_end = trace.sparsity[:, -1]
    values: dict[str, Any] = {
        "model": trace.model,
        "adapter": trace.adapter,
        "settings": trace.settings,
        "tokens": len(trace.tokens),
        "layers": list(trace.layers),
        "sparsity": float(at_end.mean()),
        "sparsity_by_layer": at_end.tolist(),
        "sparsity_over_pairs": over_pairs(trace),
    }
    if trace.loss is not None and trace.dense_loss is not None and len(trace.tokens) > 1:
        values["loss"] = float(np.nanmean(trace.loss))
        values["dense_loss"] = float(np.nanmean(trace.dense_loss))
        values["dense"] = trace.dense
    if trace.misses:
        values["misses"] = [_miss(trace, miss) for miss in trace.misses]
    return values


def over_pairs(trace: Trace) -> float:
    """Of all pairs of a token and an earlier one, the share in which it is dropped already."""
    earlier = np.arange(len(trace.tokens))
    pairs = earlier.sum() * len(trace.layers)
    return float((trace.sparsity * earlier).sum() / pairs) if pairs else 0.0


def _miss(trace: Trace, miss: Miss) -> dict[str, Any]:
    """A token that suffered; layers by their index in the model."""
    returns = [
        {
            "token": back.token,
            "text": trace.tokens[back.token],
            "layer": None if back.layer is None else trace.layers[back.layer],
            "loss": back.loss,
        }
        for back in miss.returns
    ]
    return {
        "token": miss.token,
        "text": trace.tokens[miss.token],
        "loss": miss.loss,
        "dense_loss": miss.dense_loss,
        "returns": returns,
    }
