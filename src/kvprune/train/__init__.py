"""Training on top of Hugging Face's Trainer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvprune.train.config import TrainConfig as TrainConfig

if TYPE_CHECKING:
    from kvprune.train.checkpoints import last_whole_checkpoint as last_whole_checkpoint
    from kvprune.train.trainer import PruningTrainer as PruningTrainer

# imported on first use, as Trainer takes seconds to import
_MODULES = {"PruningTrainer": "trainer", "last_whole_checkpoint": "checkpoints"}
__all__ = ["TrainConfig", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'kvprune.train' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvprune.train.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
