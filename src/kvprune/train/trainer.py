"""Hugging Face's Trainer with a gate to teach: two losses, a rising α, two learning rates."""

from __future__ import annotations

import importlib.util
import logging
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import EvalLoopOutput

from kvprune.adapters import lora
from kvprune.adapters.dense import as_base_model
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned, attach
from kvprune.train import distill, spread
from kvprune.train.config import TrainConfig
from kvprune.train.control import Control, adapted
from kvprune.train.measuring import MeasuringTrainer
from kvprune.train.progress import Lines, Progress
from kvprune.train.rates import rates, split
from kvprune.train.saves import INTERACTION
from kvprune.train.schedule import alpha_at
from kvprune.train.tally import Tally, by_layer

log = logging.getLogger(__name__)


class PruningTrainer(MeasuringTrainer):
    """Teach a model to prune, or train a baseline, with everything that Trainer offers.

    loss = (1 − distill) · next-token + distill · KL(dense ‖ pruned) + γ · mean keep

    `args` is the folder of the run, its other settings then come from `config`; or Hugging Face's
    own TrainingArguments, which then decide on steps, batches, precision and logging. `teacher` is
    the dense model to distil from; left out, it is the model as it was before training.
    """

    # every part of the loss is divided by what the whole step holds
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: PreTrainedModel | Pruned,
        config: TrainConfig | None = None,
        args: TrainingArguments | str | Path = "kvprune-run",
        *,
        eval_dataset: Any = None,
        teacher: PreTrainedModel | None = None,
        **kwargs: Any,
    ):
        config = TrainConfig() if config is None else config
        if not isinstance(args, TrainingArguments):
            more = {} if eval_dataset is not None else {"eval_strategy": "no"}
            args = config.arguments(args, **more)
        _check(args, config, eval_dataset)
        set_seed(args.seed)
        self.config = config
        self.teacher = teacher
        self.pruned = self._go_on(model) if isinstance(model, Pruned) else self._attach(model)
        self._factors = self._spread(fresh=self.pruned is not model)
        self._freeze()
        self.control_state = Control(config.gamma)
        self._restart_tally()
        use_cache = self.pruned.model.config.use_cache
        super().__init__(
            self.pruned.model,
            args,
            eval_dataset=eval_dataset,
            **{"data_collator": default_data_collator, **kwargs},
        )
        # every pass here says use_cache=False itself, and the saved config should not
        self.pruned.model.config.use_cache = use_cache
        # Trainer knows this of some causal models only; of GPT-2, say, it would count a label too
        # many in each row and make the loss that much smaller
        self._loss_shifts_labels = True
        if not self.model_accepts_loss_kwargs:
            # such a model would take the mean over each batch, whatever the step holds
            self.compute_loss_func = _next_token_loss
        if self.is_fsdp_enabled:
            for layer in self.pruned.layers:
                if layer.interaction is not None:
                    layer.interaction.beta_as_vector()
        if self.teacher is not None:
            nn.Module.to(self.teacher, args.device)
        self._factors = self._agreed(self._factors)
        self.add_callback(_Pace(self))
        for theirs, ours in ((ProgressCallback, Progress), (PrinterCallback, Lines)):
            if self.pop_callback(theirs) is not None:
                self.add_callback(ours)

    def _attach(self, model: PreTrainedModel) -> Pruned:
        config = self.config
        if advice := config.method.start_advice(self.alpha_of(0.0)):
            log.warning(advice)
        if config.distill and config.tune == "all" and self.teacher is None:
            self.teacher = distill.frozen_copy(model)
        if config.tune == "lora":
            lora.add(model, config.lora_rank, config.lora_alpha)
        return attach(model, config.method)

    def _go_on(self, pruned: Pruned) -> Pruned:
        config = self.config
        if pruned.config != config.method:
            raise PruneError(f"the model has {pruned.config}, but method is {config.method}")
        if config.tune == "lora" and not lora.has_lora(pruned.model):
            raise PruneError("LoRA has to be there before pruning; pass the plain model")
        if config.distill and config.tune == "all" and self.teacher is None:
            raise PruneError("pass teacher=: this model may be far from its dense self by now")
        return pruned

    def _spread(self, fresh: bool) -> Tensor:
        """How much larger than usual each layer's interaction weights and their steps are: (L,)."""
        if not (self.config.prunes and self.config.spread):
            return torch.ones(len(self.pruned.layers))
        factors = spread.factors(self.pruned)
        if fresh:
            spread.scale(self.pruned, factors)
        return factors

    def _freeze(self) -> None:
        tune = self.config.tune
        for name, parameter in self.pruned.model.named_parameters():
            learns = tune == "all" or INTERACTION in name or (tune == "lora" and ".lora_" in name)
            parameter.requires_grad_(learns and parameter.is_floating_point())

    @property
    def progress(self) -> float:
        return self.state.global_step / max(self.state.max_steps, 1)

    @property
    def gamma(self) -> float:
        if not self.config.prunes:
            return 0.0
        return self.control_state.gamma if self.config.target_sparsity else self.config.gamma

    def alpha_of(self, progress: float) -> float:
        c = self.config
        done = progress / c.alpha_share if c.alpha_share else 1.0
        return alpha_at(done, c.alpha_start, c.alpha_end, c.alpha_schedule)

    def set_alpha(self) -> None:
        self.pruned.alpha = self.alpha_of(self.progress)

    # ---- the loss

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **kwargs)
        pairs = torch.as_tensor(sum(_pairs(batch) for batch in batches), device=self.args.device)
        self._pairs_in_step = self.accelerator.gather(pairs.reshape(1)).sum()
        self.tally.tokens += sum(batch["input_ids"].numel() for batch in batches)
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        inputs = {**inputs, "use_cache": False}
        if not model.training:
            return self._evaluation_loss(model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        teacher = self._teacher_logits(model, inputs) if self.config.distill else None
        # a mean over the step's labels on all devices, times the devices, as DDP takes their mean
        language, outputs = super().compute_loss(model, dict(inputs), True, num_items_in_batch)
        devices = self.accelerator.num_processes
        parts = {"loss_next_token": language}
        if teacher is not None:
            share = self.config.distill
            kl = distill.kl_to_teacher(outputs["logits"], teacher, labels)
            parts["loss_kl"] = kl * devices / num_items_in_batch
            language = (1 - share) * language + share * parts["loss_kl"]
        keep = self.pruned.keep_by_layer() * (_pairs(inputs) * devices / self._pairs_in_step)
        parts |= {"loss_language": language, "loss_sparsity": self.gamma * keep.mean()}
        loss = language + parts["loss_sparsity"] if self.config.prunes else language
        self._refuse_nan(loss, parts)
        self.tally.add({**parts, "keep": keep})
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def _teacher_logits(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        asked = {name: value for name, value in inputs.items() if name != "labels"}
        if self.teacher is not None:
            with self.accelerator.autocast():
                logits: Tensor = self.teacher(**asked).logits
            return logits
        with as_base_model(self.pruned):
            logits = model(**asked)["logits"]
        return logits

    def _refuse_nan(self, loss: Tensor, parts: dict[str, Tensor]) -> None:
        if not loss.isfinite():
            numbers = ", ".join(f"{name} {part.item():.4g}" for name, part in parts.items())
            raise PruneError(f"{self._where()}: the loss is {loss.item()} ({numbers}). {REMEDY}")

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        scaled = getattr(self.accelerator, "scaler", None) is not None
        if not scaled and not torch.as_tensor(norm).isfinite():
            raise PruneError(f"{self._where()}: the gradient's norm is {float(norm)}. {REMEDY}")
        return norm

    def _where(self) -> str:
        gate = f" (α = {self.pruned.alpha:.4g}, γ = {self.gamma:.4g})" if self.config.prunes else ""
        return f"training stopped at step {self.state.global_step}{gate}"

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        fresh = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if fresh:
            named = model or self.pruned.model
            found = rates(named, self.pruned.layers, self._factors, self.config)
            optimizer.param_groups = list(split(optimizer, found))
        return optimizer

    # ---- the pace

    def probe_and_adapt(self) -> None:
        if self.eval_dataset is None or not self.config.prunes:
            return
        self.probe()
        target = self.config.target_sparsity
        if target is not None:
            assert self.hard is not None
            state = adapted(self.control_state, self.hard.total, target, self.progress)
            # processes whose rounding differs must not drift apart
            gamma = self._agreed(torch.tensor([state.gamma], dtype=torch.float64))
            self.control_state = replace(state, gamma=float(gamma))

    def _agreed(self, numbers: Tensor) -> Tensor:
        """What the first process says, on all of them."""
        everybody = self.accelerator.gather(numbers.to(self.args.device)[None])
        return everybody[0].cpu()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        self.set_alpha()
        started = time.perf_counter()
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.seconds_off += time.perf_counter() - started

    # ---- the log

    def _restart_tally(self) -> None:
        self.tally, self.seconds_off = Tally(), 0.0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.tally.sums:
            logs |= self._training_numbers()
        super().log(logs, start_time)

    def _training_numbers(self) -> dict[str, float]:
        """Means over the steps since the last log, and the switches as they stand."""
        means = self.tally.means(partial(self.accelerator.reduce, reduction="mean"))
        keep = means.pop("keep").cpu()
        if not self.config.prunes:
            del means["loss_sparsity"]
        numbers = {name: float(mean) for name, mean in means.items()}
        numbers |= by_layer("soft" if self.config.prunes else "hard", 1 - keep)
        if self.hard is not None:
            numbers |= by_layer("hard", self.hard.per_layer)
        if self.config.prunes:
            numbers |= {"alpha": self.pruned.alpha, "gamma": self.gamma}
        for group in self.optimizer.param_groups if self.optimizer else []:
            # those of single layers follow that of the whole
            if group["name"] in ("interaction", "base"):
                numbers[f"lr_{group['name']}"] = float(group["lr"])
        own = self.tally.tokens_per_second(self.seconds_off)
        numbers["tokens_per_second"] = own * self.accelerator.num_processes
        self._restart_tally()
        return numbers


REMEDY = (
    "Nothing of this step was kept: resume from the last checkpoint with a lower interaction_lr "
    "or base_lr, a max_grad_norm of 1 or less, or without bf16; if it comes back at the same step, "
    "look at that batch"
)


class _Pace(TrainerCallback):
    """What happens at every step: α before it, a probe after some."""

    def __init__(self, trainer: PruningTrainer):
        self.trainer = trainer

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer.set_alpha()

    def on_step_end(self, args: Any, state: Any, *more: Any, **kwargs: Any) -> None:
        self.trainer.tally.steps += 1
        if state.global_step % self.trainer.config.probe_every == 0:
            self.trainer.probe_and_adapt()


def _check(args: TrainingArguments, config: TrainConfig, eval_dataset: Any) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise PruneError("training needs the package accelerate: pip install 'kvprune[train]'")
    if args.n_gpu > 1:
        raise PruneError(
            f"one process would drive {args.n_gpu} GPUs with DataParallel, which copies the model "
            f"at each step and loses its gates; start with `accelerate launch`, or show it one GPU "
            f"with CUDA_VISIBLE_DEVICES=0"
        )
    if config.target_sparsity is not None and eval_dataset is None:
        raise PruneError(
            "target_sparsity needs an evaluation text to measure sparsity on; pass eval_dataset"
        )


def _pairs(batch: dict[str, Any]) -> Any:
    """How many pairs of a token and an earlier one a batch holds; pads do not count."""
    rows, length = batch["input_ids"].shape
    mask = batch.get("attention_mask")
    if mask is None:
        return rows * length * (length - 1) // 2
    real = mask.sum(-1)
    return (real * (real - 1) // 2).sum()


def _next_token_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"][:, :-1].float().flatten(0, 1)
    want = labels[:, 1:].flatten().to(logits.device)
    total = F.cross_entropy(logits, want, ignore_index=distill.IGNORE, reduction="sum")
    return total / num_items_in_batch
