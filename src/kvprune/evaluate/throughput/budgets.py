"""Baselines that hold a given number of tokens."""

from __future__ import annotations

from kvprune.errors import PruneError
from kvprune.methods import METHODS
from kvprune.methods.base import Method

# every method that can be given a size, and needs no training of its own
BASELINES = ("local", "strided", "streaming", "tova", "h2o", "snapkv", "keynorm")


def budgeted(name: str, kept: int, context: int) -> Method:
    """A baseline that holds about `kept` tokens after `context`."""
    if name not in BASELINES:
        raise PruneError(f"baseline {name!r} is unknown; choose from {', '.join(BASELINES)}")
    return METHODS[name].with_budget(kept, context)
