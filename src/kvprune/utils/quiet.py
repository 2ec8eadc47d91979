"""Silence for transformers: a command prints its own messages only."""

from __future__ import annotations


def quiet() -> None:
    """Errors only, and no progress bar for loading; that of training stays."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
