"""Checks of settings; errors name the setting, its value and the limits."""

from __future__ import annotations

import math
from typing import Any

from kvprune.errors import PruneError


def check_number(
    config: Any,
    name: str,
    at_least: float,
    at_most: float = math.inf,
    integer: bool = False,
) -> None:
    value = getattr(config, name)
    kinds = int if integer else (int, float)
    is_valid = (
        isinstance(value, kinds) and not isinstance(value, bool) and at_least <= value <= at_most
    )
    if not is_valid or not math.isfinite(value):
        kind = "whole number" if integer else "number"
        limits = f"{at_least:g} to {at_most:g}" if at_most < math.inf else f"{at_least:g} or more"
        raise PruneError(f"{name}={value!r} must be a {kind}, {limits}")
