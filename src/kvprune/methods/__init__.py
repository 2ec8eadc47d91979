"""What is dropped, and when: one file per method.

A new method is one new file and one line here.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from kvprune.errors import PruneError
from kvprune.methods.base import Method
from kvprune.methods.dense import DenseConfig
from kvprune.methods.h2o import H2OConfig
from kvprune.methods.keynorm import KeyNormConfig
from kvprune.methods.learned import PruningConfig
from kvprune.methods.local import LocalConfig
from kvprune.methods.snapkv import SnapKVConfig
from kvprune.methods.streaming import StreamingConfig
from kvprune.methods.strided import StridedConfig
from kvprune.methods.tova import TovaConfig

METHODS: dict[str, type[Method]] = {
    method.method: method
    for method in (
        PruningConfig,
        DenseConfig,
        LocalConfig,
        StridedConfig,
        StreamingConfig,
        TovaConfig,
        H2OConfig,
        SnapKVConfig,
        KeyNormConfig,
    )
}


def method_from_dict(values: dict[str, Any]) -> Method:
    """The method that `Method.to_dict` wrote."""
    values = dict(values)
    name = values.pop("method", None)
    if name not in METHODS:
        raise PruneError(f"method {name!r} is unknown; choose one of {', '.join(METHODS)}")
    known = {field.name for field in fields(METHODS[name])}
    if unknown := sorted(set(values) - known):
        raise PruneError(
            f"{', '.join(unknown)}: no such setting of {METHODS[name].__name__}; it has "
            f"{', '.join(sorted(known)) or 'none'}. A newer kvprune may have written this"
        )
    return METHODS[name](**values)
