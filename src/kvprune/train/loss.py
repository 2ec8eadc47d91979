"""The training loss: language, distillation and sparsity, each a mean over the global step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from kvprune.train.distill import IGNORE

# for a loss or a gradient that is not finite
REMEDY = (
    "This step was not applied: resume from the last checkpoint with a lower interaction_lr or "
    "base_lr, a max_grad_norm of 1 or less, or without bf16; if it fails at the same step again, "
    "look at that batch"
)


@dataclass(frozen=True)
class PruningLoss:
    """loss = (1 − distill) · next-token + distill · KL(dense ‖ pruned) + γ · mean keep"""

    distill: float = 0.0

    def __call__(
        self, next_token: Tensor | None, kl: Tensor | None, keep: Tensor, gamma: float | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its parts, as they are logged. keep: (L,); no γ: no sparsity loss.

        One of next_token and kl is enough if the other has no weight.
        """
        both = {"loss_next_token": next_token, "loss_kl": kl}
        parts = {name: part for name, part in both.items() if part is not None}
        if next_token is not None and kl is not None:
            language = (1 - self.distill) * next_token + self.distill * kl
        else:
            (language,) = parts.values()
        parts["loss_language"] = language
        if gamma is None:
            return language, parts
        parts["loss_sparsity"] = gamma * keep.mean()
        return language + parts["loss_sparsity"], parts


def count_pairs(batch: dict[str, Any]) -> Any:
    """How many pairs of a token and an earlier one a batch has, padding excluded."""
    rows, length = batch["input_ids"].shape
    mask = batch.get("attention_mask")
    if mask is None:
        return rows * length * (length - 1) // 2
    real = mask.sum(-1)
    return (real * (real - 1) // 2).sum()


def next_token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """For models that compute the mean over each batch, however many labels the step has."""
    logits = outputs["logits"][:, :-1].float().flatten(0, 1)
    want = labels[:, 1:].flatten().to(logits.device)
    total = F.cross_entropy(logits, want, ignore_index=IGNORE, reduction="sum")
    mean: Tensor = total / num_items_in_batch
    return mean
