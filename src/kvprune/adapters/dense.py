"""The base model inside a pruned one, without a second copy of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvprune.adapters import lora
from kvprune.integration.handle import Pruned


@contextmanager
def as_base_model(pruned: Pruned) -> Iterator[None]:
    """Run the model with pruning and LoRA switched off, in eval mode.

    This is the model before training, provided that its own weights were frozen.
    """
    with pruned.evaluating(), pruned.dense():
        lora.enable(pruned.model, False)
        try:
            yield
        finally:
            lora.enable(pruned.model, True)
