"""What an evaluation adds up, row by row, so that batches and processes do not matter."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from kvprune.integration.handle import Pruned
from kvprune.train.distill import IGNORE


def by_row(logits: Tensor, labels: Tensor, pruned: Pruned) -> Tensor:
    """Of each row: its loss, its labels, and of each layer the keep and the pairs: (B, 2 + 2 L)."""
    target = labels[:, 1:].to(logits.device)
    # row by row, as a whole batch of logits in float32 may not fit
    loss = torch.stack(
        [
            F.cross_entropy(row[:-1].float(), want, ignore_index=IGNORE, reduction="sum")
            for row, want in zip(logits, target, strict=True)
        ]
    )
    count = (target != IGNORE).sum(-1)
    columns = [loss, count]
    for layer in pruned.last_pass.ordered():
        pair = layer.kept_pairs().detach(), layer.timeline.pairs()
        columns += [part.to(logits.device) for part in pair]
    return torch.stack([column.double() for column in columns], dim=-1)


def summary(rows: Tensor, gate: str) -> dict[str, float]:
    """Loss, perplexity and sparsity of all rows; `gate` is soft or hard, and ends the names."""
    total = rows.double().sum(0).cpu()
    loss = float(total[0] / total[1].clamp(min=1))
    kept, pairs = total[2::2], total[3::2]
    sparsity = 1 - kept / pairs.clamp(min=1)
    sparsity = sparsity.where(pairs > 0, 0.0)
    return {
        f"loss_{gate}": loss,
        f"ppl_{gate}": math.exp(min(loss, 700.0)),
        f"sparsity_{gate}": float(sparsity.mean()),
        **{f"sparsity_{gate}_layer_{i}": float(share) for i, share in enumerate(sparsity)},
    }
