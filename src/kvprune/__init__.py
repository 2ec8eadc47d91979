"""Teach a causal language model to forget the tokens that it no longer needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvprune.utils.openmp import spin_briefly
from kvprune.version import __version__ as __version__

if TYPE_CHECKING:
    from kvprune.adapters.load import load as load
    from kvprune.cache.arena import Arena as Arena
    from kvprune.cache.pruned_cache import PrunedCache as PrunedCache
    from kvprune.cache.snapshot import Snapshot as Snapshot
    from kvprune.config import DenseConfig as DenseConfig
    from kvprune.config import H2OConfig as H2OConfig
    from kvprune.config import KeyNormConfig as KeyNormConfig
    from kvprune.config import LocalConfig as LocalConfig
    from kvprune.config import PruningConfig as PruningConfig
    from kvprune.config import SnapKVConfig as SnapKVConfig
    from kvprune.config import StreamingConfig as StreamingConfig
    from kvprune.config import StridedConfig as StridedConfig
    from kvprune.config import TovaConfig as TovaConfig
    from kvprune.errors import BudgetError as BudgetError
    from kvprune.errors import PruneError as PruneError
    from kvprune.integration.handle import Pruned as Pruned
    from kvprune.integration.handle import Sparsity as Sparsity
    from kvprune.integration.handle import attach as attach
    from kvprune.ops.alpha_sigmoid import alpha_sigmoid as alpha_sigmoid
    from kvprune.ops.alpha_sigmoid import log_alpha_sigmoid as log_alpha_sigmoid
    from kvprune.ops.alpha_sigmoid import temperature_sigmoid as temperature_sigmoid
    from kvprune.ops.timeline import NEVER as NEVER

# read on first use: torch and transformers take seconds to import, and `kvprune --help` must not
_HOME = {
    "attach": "integration.handle",
    "Pruned": "integration.handle",
    "Sparsity": "integration.handle",
    "PrunedCache": "cache.pruned_cache",
    "Snapshot": "cache.snapshot",
    "Arena": "cache.arena",
    "PruningConfig": "config",
    "DenseConfig": "config",
    "LocalConfig": "config",
    "StridedConfig": "config",
    "TovaConfig": "config",
    "StreamingConfig": "config",
    "H2OConfig": "config",
    "SnapKVConfig": "config",
    "KeyNormConfig": "config",
    "PruneError": "errors",
    "BudgetError": "errors",
    "alpha_sigmoid": "ops.alpha_sigmoid",
    "log_alpha_sigmoid": "ops.alpha_sigmoid",
    "temperature_sigmoid": "ops.alpha_sigmoid",
    "NEVER": "ops.timeline",
    "load": "adapters.load",
}
__all__ = ["__version__", *_HOME]

spin_briefly()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvprune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"kvprune.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
