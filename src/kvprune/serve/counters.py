"""What the engine counts, in all and for each model that it serves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

BY_MODEL = (
    "prompt_tokens", "generation_tokens", "preemptions", "prefix_queries", "prefix_hits",
    "prefix_hit_tokens", "requests_stop", "requests_length", "requests_cancelled",
    "requests_error",
)  # fmt: skip
NAMES = (
    *BY_MODEL, "seen_slots", "steps", "admitted", "forecast_error", "read_again", "peak_bytes",
)  # fmt: skip


class Counters(dict[str, Any]):
    """Numbers by name; `by_model` has those of each model, `dropped_by_layer` those of layers."""

    def __init__(self, layers: int, models: Iterable[str]):
        super().__init__(dict.fromkeys(NAMES, 0))
        self["dropped_by_layer"] = [0] * layers
        self["by_model"] = {model: dict.fromkeys(BY_MODEL, 0) for model in models}

    def add(self, name: str, model: str, number: int = 1) -> None:
        """Count something that a model's row did."""
        self[name] += number
        self["by_model"][model][name] += number

    def drop(self, tokens: int, kept: list[int]) -> None:
        """A row ended after so many tokens, of which its layers still held these."""
        before = self["dropped_by_layer"]
        self["dropped_by_layer"] = [a + tokens - b for a, b in zip(before, kept, strict=True)]

    def frozen(self) -> dict[str, Any]:
        """As they are now: a copy for other threads."""
        by_model = {model: dict(own) for model, own in self["by_model"].items()}
        return {**self, "by_model": by_model}
