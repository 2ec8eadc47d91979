"""Console output: one short line per log, and the current numbers on the progress bar."""

from __future__ import annotations

import sys
from typing import Any

from transformers import ProgressCallback, TrainerCallback

# everything else is in TensorBoard
ON_THE_BAR = ("loss", "alpha", "sparsity_soft", "sparsity_hard", "tokens_per_second")
ON_A_LINE = {
    "loss": "loss {:.4g}",
    "loss_language": "language {:.4g}",
    "loss_sparsity": "sparsity {:.4g}",
    "sparsity_soft": "pruned soft {:.1%}",
    "sparsity_hard": "hard {:.1%}",
    "alpha": "α {:.3g}",
    "gamma": "γ {:.3g}",
    "grad_norm": "|grad| {:.2g}",
    "tokens_per_second": "{:.0f} tokens/s",
    "eval_ppl_soft": "held out: perplexity soft {:.2f}",
    "eval_ppl_hard": "hard {:.2f}",
    "eval_sparsity_soft": "pruned soft {:.1%}",
    "eval_sparsity_hard": "hard {:.1%}",
}


class ProgressBarCallback(ProgressCallback):
    """Hugging Face's progress bar with readable lines, on stderr: stdout is for results."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if self.training_bar is None or not logs:
            return
        if "loss" in logs:
            shown = {name: f"{logs[name]:.4g}" for name in ON_THE_BAR if name in logs}
            self.training_bar.set_postfix(shown, refresh=False)
        if text := format_line(state.global_step, logs):
            self.training_bar.write(text, file=sys.stderr)


class LineCallback(TrainerCallback):
    """The same lines where progress bars are disabled."""

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if state.is_local_process_zero and (text := format_line(state.global_step, logs or {})):
            print(text, file=sys.stderr)


def format_line(step: int, logs: dict[str, Any]) -> str:
    """A log in words; empty if it contains nothing to show."""
    parts = [form.format(logs[name]) for name, form in ON_A_LINE.items() if name in logs]
    return f"step {step:>5}   {', '.join(parts)}" if parts else ""
