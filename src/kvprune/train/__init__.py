"""Training on top of Hugging Face's Trainer: what is learnt, how strongly, and against what."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvprune.train.config import TrainConfig as TrainConfig

if TYPE_CHECKING:
    from kvprune.train.checkpoints import last_whole_checkpoint as last_whole_checkpoint
    from kvprune.train.trainer import PruningTrainer as PruningTrainer

# read on first use, as the Trainer takes seconds to import
_HOME = {"PruningTrainer": "trainer", "last_whole_checkpoint": "checkpoints"}
__all__ = ["TrainConfig", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvprune.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvprune.train.{_HOME[name]}"), name)
    globals()[name] = value
    return value
