"""An evaluation that asks twice: with the gate as it is trained, and with the hard one."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_utils import EvalLoopOutput

from kvprune.integration.handle import Sparsity
from kvprune.train import measure
from kvprune.train.saves import SavingTrainer


class MeasuringTrainer(SavingTrainer):
    """Soft and hard perplexity and sparsity, and a quick look at the latter between steps."""

    hard: Sparsity | None = None  # as last probed
    _rows: list[Tensor] | None = None  # of the evaluation at hand

    def probe(self) -> Sparsity:
        """The hard sparsity on a few rows of the evaluation text, now."""
        rows = self._probe_rows()
        # under FSDP this is the wrapper, which brings the shards together
        model = self.model or self.pruned.model
        with torch.no_grad(), self.pruned.evaluating():
            model(**rows, use_cache=False)
        self.hard = self.pruned.sparsity()
        return self.hard

    def _probe_rows(self) -> dict[str, Tensor]:
        data: Any = self.eval_dataset
        count = self.config.probe_rows
        if isinstance(data, dict):
            data = next(iter(data.values()))
        if hasattr(data, "__len__"):
            count = min(count, len(data))
            rows = [data[i * len(data) // count] for i in range(count)]
        else:
            rows = list(itertools.islice(data, count))
        batch = self._prepare_inputs(self.data_collator(rows))
        return {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Once with the gate of the moment, once with the hard one, whose loss is the loss."""
        gates = {"soft": False, "hard": True} if self.config.prunes else {"hard": True}
        if description != "Evaluation":
            gates = {"hard": True}
        metrics: dict[str, float] = {}
        for gate, hard in gates.items():
            before, self.pruned.hard = self.pruned.hard, hard
            self._rows = []
            try:
                output = super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
                if self._rows:
                    numbers = measure.summary(torch.cat(self._rows), gate)
                    metrics |= {f"{metric_key_prefix}_{k}": v for k, v in numbers.items()}
            finally:
                self.pruned.hard, self._rows = before, None
        if f"{metric_key_prefix}_loss_hard" in metrics:
            metrics[f"{metric_key_prefix}_loss"] = metrics[f"{metric_key_prefix}_loss_hard"]
        return output._replace(metrics={**(output.metrics or {}), **metrics})

    def _evaluation_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool, items: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, dict(inputs), True, items)
        if self._rows is not None and inputs.get("labels") is not None:
            rows = measure.by_row(outputs["logits"], inputs["labels"], self.pruned)
            self._rows.append(self.accelerator.gather_for_metrics(rows))
        return (loss, outputs) if return_outputs else loss
