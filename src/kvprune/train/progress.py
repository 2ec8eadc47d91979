"""The console: one short line a log, and the numbers of the moment on the bar."""

from __future__ import annotations

from typing import Any

from transformers import ProgressCallback

# what is too long for a line is in TensorBoard
ON_THE_BAR = ("loss", "alpha", "sparsity_soft", "sparsity_hard", "tokens_per_second")


class Progress(ProgressCallback):
    """Hugging Face's progress bar without a number for each layer."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        logs = logs or {}
        if self.training_bar is not None and "loss" in logs:
            shown = {name: f"{logs[name]:.4g}" for name in ON_THE_BAR if name in logs}
            self.training_bar.set_postfix(shown, refresh=False)
        short = {name: value for name, value in logs.items() if "_layer_" not in name}
        super().on_log(args, state, control, logs=short, **kwargs)
