"""Checks of what the user gave; errors name the thing, its value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuse a prompt without text: a model has nothing to continue there."""
    if not prompts:
        raise PruneError("there is no prompt; give at least one line of text")
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            which = "the prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}"
            raise PruneError(
                f"{which} is empty ({prompt!r}); write some text for the model to continue"
            )
