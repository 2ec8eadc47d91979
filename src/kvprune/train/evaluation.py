"""Loss, perplexity and sparsity on held-out text, with the soft gate and with the hard one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerState
from transformers.trainer_utils import EvalLoopOutput

from kvprune.integration.handle import Pruned, Sparsity
from kvprune.train.distill import IGNORE
from kvprune.train.metrics import sparsity_metrics


class Evaluation:
    """Runs Trainer's evaluation loop once per gate and sums up the rows of each.

    Rows are gathered and summed exactly, so the numbers depend neither on the batch size nor on
    the number of processes. `gather` collects rows from all processes.
    """

    def __init__(self, pruned: Pruned, gather: Callable[[Tensor], Tensor]):
        self.pruned, self.gather = pruned, gather
        self._rows: list[Tensor] | None = None  # of the running evaluation

    def run(
        self, loop: Callable[[], EvalLoopOutput], gates: Iterable[str], prefix: str
    ) -> EvalLoopOutput:
        """The last gate's output with the metrics of all; `eval_loss` is that of the hard gate."""
        metrics: dict[str, float] = {}
        for gate in gates:
            before, self.pruned.hard = self.pruned.hard, gate == "hard"
            self._rows = []
            try:
                output = loop()
                if self._rows:
                    numbers = summarize(torch.cat(self._rows), gate)
                    metrics |= {f"{prefix}_{name}": number for name, number in numbers.items()}
            finally:
                self.pruned.hard, self._rows = before, None
        if f"{prefix}_loss_hard" in metrics:
            metrics[f"{prefix}_loss"] = metrics[f"{prefix}_loss_hard"]
        return output._replace(metrics={**(output.metrics or {}), **metrics})

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch that the model has just read, if an evaluation is running."""
        if self._rows is not None:
            self._rows.append(self.gather(row_sums(logits, labels, self.pruned)))


class SparsityProbe(TrainerCallback):
    """Measures the hard sparsity every few steps."""

    def __init__(self, measure: Callable[[], Sparsity], every: int):
        self.measure, self.every = measure, every
        self.sparsity: Sparsity | None = None  # as last measured
        self.step: int | None = None  # when

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.every == 0:
            self.sparsity, self.step = self.measure(), state.global_step


@torch.no_grad()
def hard_sparsity(model: nn.Module, pruned: Pruned, batch: dict[str, Tensor]) -> Sparsity:
    """What the hard gate drops of this batch. `model` is `pruned.model` or its FSDP wrapper."""
    with pruned.evaluating():
        model(**batch, use_cache=False)
    return pruned.sparsity()


def spaced_rows(dataset: Any, count: int) -> list[Any]:
    """`count` rows, evenly spaced over the dataset; of a stream, the first ones."""
    if isinstance(dataset, dict):
        dataset = next(iter(dataset.values()))
    if not hasattr(dataset, "__len__"):
        return list(itertools.islice(dataset, count))
    count = min(count, len(dataset))
    return [dataset[i * len(dataset) // count] for i in range(count)]


def row_sums(logits: Tensor, labels: Tensor, pruned: Pruned) -> Tensor:
    """Per row: its loss, its number of labels, and keep and pairs of each layer: (B, 2 + 2 L)."""
    target = labels[:, 1:].to(logits.device)
    # row by row, as the logits of a full batch may not fit in float32
    loss = torch.stack(
        [
            F.cross_entropy(row[:-1].float(), want, ignore_index=IGNORE, reduction="sum")
            for row, want in zip(logits, target, strict=True)
        ]
    )
    count = (target != IGNORE).sum(-1)
    columns = [loss, count, *_keep_and_pairs(pruned)]
    return torch.stack([column.to(logits.device).double() for column in columns], dim=-1)


def _keep_and_pairs(pruned: Pruned) -> list[Tensor]:
    """Sum of keep over pairs and number of pairs, (B,) each, layer by layer, of the last pass."""
    columns: list[Tensor] = []
    for layer in pruned.last_pass.ordered():
        columns += [layer.kept_pairs().detach(), layer.timeline.pairs()]
    return columns


def summarize(rows: Tensor, gate: str) -> dict[str, float]:
    """Loss, perplexity and sparsity over all rows; the names end in `gate`, soft or hard."""
    total = rows.double().sum(0).cpu()
    loss = float(total[0] / total[1].clamp(min=1))
    kept, pairs = total[2::2], total[3::2]
    sparsity = 1 - kept / pairs.clamp(min=1)
    sparsity = sparsity.where(pairs > 0, 0.0)
    return {
        f"loss_{gate}": loss,
        f"ppl_{gate}": math.exp(min(loss, 700.0)),
        **sparsity_metrics(gate, sparsity),
    }
