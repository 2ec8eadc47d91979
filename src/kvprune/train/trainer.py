"""Hugging Face's Trainer, with a gate to train. What it adds is in parts, one per file.

prepare       attach pruning and LoRA, scale the interaction weights, freeze the rest
loss          language + distillation + sparsity
distillation  the teacher, and the KL to it
alpha         the schedule of α, a callback
gamma         the control of γ, a callback
evaluation    soft and hard perplexity and sparsity; the probe, a callback
metrics       what is logged, a callback
parameters    learning rates
average       the mean of the weights over steps, a callback
checkpoints   atomic checkpoints
"""

from __future__ import annotations

import logging
import shutil
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints

from kvprune.adapters import lora
from kvprune.adapters.load import fill
from kvprune.adapters.save import describe_base, save
from kvprune.adapters.saved_file import FILE
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned, Sparsity
from kvprune.train import checkpoints
from kvprune.train.alpha import AlphaSchedule
from kvprune.train.average import WeightAverage
from kvprune.train.card import model_card
from kvprune.train.config import TrainConfig
from kvprune.train.console import LineCallback, ProgressBarCallback
from kvprune.train.distill import kl_to_teacher
from kvprune.train.distillation import Distillation
from kvprune.train.evaluation import Evaluation, SparsityProbe, hard_sparsity, spaced_rows
from kvprune.train.gamma import GammaControl, GammaState
from kvprune.train.loss import REMEDY, PruningLoss, count_pairs, next_token_loss
from kvprune.train.metrics import StepMetrics, sparsity_metrics
from kvprune.train.parameters import INTERACTION, learning_rates, parameter_groups, rate_metrics
from kvprune.train.prepare import check_arguments, prepare
from kvprune.utils.files import write_atomically

log = logging.getLogger(__name__)


class PruningTrainer(Trainer):
    """Train a model to prune, or a baseline, with everything that Trainer offers.

    loss = (1 − distill) · next-token + distill · KL(dense ‖ pruned) + γ · mean keep

    `args` is the folder of the run, its other settings then come from `config`; or Hugging Face's
    own TrainingArguments, which then decide on steps, batches, precision and logging. `teacher` is
    the dense model to distil from; by default, the model as it was before training.
    """

    # every part of the loss is divided by the totals of the global step
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
        check_arguments(args, config, eval_dataset)
        set_seed(args.seed)
        self.config = config
        self.pruned, self.teacher, factors = prepare(model, config, teacher)
        use_cache = self.pruned.model.config.use_cache
        super().__init__(
            self.pruned.model,
            args,
            eval_dataset=eval_dataset,
            **{"data_collator": default_data_collator, **kwargs},
        )
        # every pass here is given use_cache=False, which the saved config should not be
        self.pruned.model.config.use_cache = use_cache
        # Trainer knows this of some causal models only; for GPT-2, say, it would count one label
        # too many per row and make the loss smaller
        self._loss_shifts_labels = True
        if not self.model_accepts_loss_kwargs:
            self.compute_loss_func = next_token_loss
        if self.is_fsdp_enabled:
            if config.average:
                raise PruneError(f"average={config.average} does not work with FSDP; use 0")
            for interaction in self.pruned.interactions:
                interaction.beta_as_vector()  # type: ignore[operator]
        if self.teacher is not None:
            nn.Module.to(self.teacher, args.device)
        self.rate_factors = self._from_first_process(factors)
        self._add_parts()

    def _add_parts(self) -> None:
        config, accelerator = self.config, self.accelerator
        self.loss = PruningLoss(config.distill)
        if config.distill:
            # a wrapper may not pass on what hidden states need, and a compiled model gains nothing
            plain = accelerator.num_processes == 1 and not self.is_fsdp_enabled
            self.distillation = Distillation(
                self.pruned, self.teacher, accelerator.autocast, config.teacher_cache,
                by_states=config.distill == 1 and plain and not config.compile,
            )  # fmt: skip
        self.evaluation = Evaluation(self.pruned, accelerator.gather_for_metrics)
        self.checkpoints = checkpoints.CheckpointWriter(
            self.args.should_save, accelerator.wait_for_everyone
        )
        self.alpha = AlphaSchedule(self.pruned, config)
        self.metrics = StepMetrics()
        self.probe = SparsityProbe(self._measure_sparsity, config.probe_every)
        self.gamma = GammaControl(
            config.gamma, config.target_sparsity, self.probe, self._from_first_process
        )
        self.average = WeightAverage(self.pruned, config.average) if config.average else None
        if self.average is not None:
            self.add_callback(self.average)
        self.add_callback(self.alpha)
        self.add_callback(self.metrics)
        if config.prunes and self.eval_dataset is not None:
            self.add_callback(self.probe)
            self.add_callback(self.gamma)
        for default, callback in (
            (ProgressCallback, ProgressBarCallback),
            (PrinterCallback, LineCallback),
        ):
            if self.pop_callback(default) is not None:
                self.add_callback(callback)

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir or ".")

    def _from_first_process(self, numbers: Tensor) -> Tensor:
        """The first process's numbers, on all of them."""
        gathered: Tensor = self.accelerator.gather(numbers.to(self.args.device)[None])
        return gathered[0].cpu()

    # ---- one step

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if is_new:
            rates = learning_rates(
                model or self.pruned.model, self.pruned, self.rate_factors, self.config
            )
            optimizer.param_groups = list(parameter_groups(optimizer, rates))
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **kwargs)
        pairs = torch.as_tensor(sum(map(count_pairs, batches)), device=self.args.device)
        self._pairs_in_step = self.accelerator.gather(pairs.reshape(1)).sum()
        self.metrics.tokens += sum(batch["input_ids"].numel() for batch in batches)
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        inputs = {**inputs, "use_cache": False}
        labels = inputs.get("labels")
        if not model.training:
            loss, outputs = super().compute_loss(model, dict(inputs), True, num_items_in_batch)
            if labels is not None:
                self.evaluation.add(outputs["logits"], labels)
            return (loss, outputs) if return_outputs else loss
        # Trainer takes the mean over the labels of the global step, times the number of devices,
        # as DDP averages over them; the other parts do the same
        devices = self.accelerator.num_processes
        language = kl = outputs = None
        if self.config.distill == 1:
            kl = self.distillation.kl(model, inputs) * devices / num_items_in_batch
        else:
            teacher = None
            if self.config.distill:
                teacher = self.distillation.teacher_logits(model, inputs)
            language, outputs = super().compute_loss(model, dict(inputs), True, num_items_in_batch)
            if teacher is not None:
                total = kl_to_teacher(outputs["logits"], teacher, inputs["labels"])
                kl = total * devices / num_items_in_batch
        pairs = count_pairs(inputs)
        keep = self.pruned.keep_by_layer() * (pairs * devices / self._pairs_in_step)
        gamma = self.gamma.value if self.config.prunes else None
        loss, parts = self.loss(language, kl, keep, gamma)
        if not loss.isfinite():
            numbers = ", ".join(f"{name} {part.item():.4g}" for name, part in parts.items())
            raise self._stopped(f"the loss is {loss.item()} ({numbers})")
        self.metrics.add({**parts, "keep": keep})
        return (loss, outputs) if return_outputs else loss

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        trainer: Any = super()
        norm = trainer._get_grad_norm(model, grad_norm=grad_norm)
        scaled = getattr(self.accelerator, "scaler", None) is not None
        if not scaled and not torch.as_tensor(norm).isfinite():
            raise self._stopped(f"the gradient's norm is {float(norm)}")
        return norm

    def _stopped(self, reason: str) -> PruneError:
        gate = ""
        if self.config.prunes:
            gate = f" (α = {self.pruned.alpha:.4g}, γ = {self.gamma.value:.4g})"
        step = self.state.global_step
        return PruneError(f"training stopped at step {step}{gate}: {reason}. {REMEDY}")

    # ---- measurements and log

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Once with the current gate and once with the hard one, whose loss is `eval_loss`."""
        loop = partial(
            super().evaluation_loop,
            dataloader,
            description,
            prediction_loss_only,
            ignore_keys,
            metric_key_prefix,
        )
        both = self.config.prunes and description == "Evaluation"
        self.alpha.apply(self.state)
        mean = nullcontext() if self.average is None else self.average.applied()
        with self.metrics.paused(), mean:
            return self.evaluation.run(
                loop, ("soft", "hard") if both else ("hard",), metric_key_prefix
            )

    def _measure_sparsity(self) -> Sparsity:
        rows = spaced_rows(self.eval_dataset, self.config.probe_rows)
        batch = self._prepare_inputs(self.data_collator(rows))
        batch = {name: batch[name] for name in ("input_ids", "attention_mask") if name in batch}
        # under FSDP this is the wrapper, which gathers the shards
        return hard_sparsity(self.model or self.pruned.model, self.pruned, batch)

    def last_evaluation(self, at_least: int = 0) -> dict[str, float] | None:
        """The metrics of the newest evaluation, unless it is from before step `at_least`."""
        for entry in reversed(self.state.log_history):
            if "eval_loss" in entry and entry["step"] >= at_least:
                return entry
        return None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs and self.metrics.sums:
            logs |= self._training_metrics()
            self.metrics.reset()
        super().log(logs, start_time)

    def _training_metrics(self) -> dict[str, float]:
        """Means over the steps since the last log, and the current settings of the gate."""
        means = self.metrics.means(partial(self.accelerator.reduce, reduction="mean"))
        keep = means.pop("keep").cpu()
        values = {name: float(mean) for name, mean in means.items()}
        values |= sparsity_metrics("soft" if self.config.prunes else "hard", 1 - keep)
        if self.probe.sparsity is not None:
            values |= sparsity_metrics("hard", self.probe.sparsity.per_layer)
        if self.config.prunes:
            values |= {"alpha": self.pruned.alpha, "gamma": self.gamma.value}
        values |= rate_metrics(self.optimizer)
        speed = self.metrics.tokens_per_second() * self.accelerator.num_processes
        return values | {"tokens_per_second": speed}

    # ---- checkpoints

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As Trainer's; True resumes from the newest complete checkpoint."""
        checkpoint = checkpoints.find_checkpoint(self.folder, resume_from_checkpoint)
        return super().train(str(checkpoint) if checkpoint else None, trial, ignore_keys_for_eval)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.checkpoints.staging or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run = Path(super()._get_output_dir(trial))
        name = f"checkpoint-{self.state.global_step}"
        with self.metrics.paused():
            with self.checkpoints.write(run, name) as staged:
                super()._save_checkpoint(model, trial)
                best = self.state.best_model_checkpoint
                if best is not None and Path(best).parent == staged.parent:
                    self.state.best_model_checkpoint = str(run / Path(best).name)
                if self.args.should_save:
                    if self.average is not None:
                        self.average.save(staged, as_adapter=self.config.tune != "all")
                    checkpoints.write_settings(
                        staged, self.config.to_dict(), asdict(self.gamma.state)
                    )
                    self.state.save_to_json(str(staged / "trainer_state.json"))
            if self.args.should_save:
                rotate_checkpoints(
                    output_dir=str(run),
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=self.state.best_model_checkpoint,
                    use_mtime=True,
                )
            self.accelerator.wait_for_everyone()

    def _load_from_checkpoint(self, checkpoint: str, model: nn.Module | None = None) -> None:
        config, gamma = checkpoints.read_settings(Path(checkpoint))
        self.gamma.state = GammaState(**gamma)
        if self.average is not None:
            self.average.restore(Path(checkpoint))
        current = self.config.to_dict()
        for name, value in config.items():
            if current.get(name) != value:
                log.warning(
                    "%s was %s when the run began and is now %s", name, value, current[name]
                )
        if self.is_fsdp_enabled or self.config.tune == "all":
            super()._load_from_checkpoint(checkpoint, model)
        if not self.is_fsdp_enabled:
            fill(self.pruned, checkpoint)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Interaction weights have a file of their own, tied weights another name."""
        tied = set(self.pruned.model.all_tied_weights_keys)
        missing = [k for k in load_result.missing_keys if INTERACTION not in k and k not in tied]
        if missing or load_result.unexpected_keys:
            raise PruneError(
                f"the checkpoint is of another model: missing {missing}, "
                f"unexpected {load_result.unexpected_keys}"
            )

    # ---- results: see kvprune.adapters.saved_file for the files in each kind of folder

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's; but the complete model also where FSDP would only write shards."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        sharded = plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type)
        if sharded and not _internal_call:
            state = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state)
        super().save_model(output_dir, _internal_call)

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None
    ) -> None:
        folder = Path(output_dir) if output_dir else self.folder
        if self.config.tune == "all":
            state = self.pruned.model.state_dict() if state_dict is None else state_dict
            super()._save(str(folder), {n: t for n, t in state.items() if INTERACTION not in n})
        elif self.processing_class is not None:
            self.processing_class.save_pretrained(str(folder))
        # last, so that a folder with this file is complete
        save(self.pruned, folder, state_dict)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write README.md into the run's folder, as push_to_hub does.

        Of Trainer's own arguments: language, license, model_name, finetuned_from, and dataset, the
        names of the data. `settings` is anything else that the card should record.
        """
        if not self.is_world_process_zero():
            return
        data = kwargs.get("dataset") or []
        card = model_card(
            self.config,
            name=self.args.hub_model_id or kwargs.get("model_name") or self.folder.name,
            base=kwargs.get("finetuned_from") or describe_base(self.pruned.model)["name"],
            data=[data] if isinstance(data, str) else data,
            measured=self.last_evaluation(),
            settings=kwargs.get("settings"),
            steps=self.state.global_step,
            language=kwargs.get("language"),
            license=kwargs.get("license"),
        )
        write_atomically(self.folder / "README.md", card.encode())

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Trainer copies the files that it knows into the folder that it pushes; add ours."""
        if self.is_world_process_zero():
            for name in (FILE, lora.CONFIG, lora.WEIGHTS):
                if (Path(checkpoint_folder) / name).is_file():
                    shutil.copy(Path(checkpoint_folder) / name, self.folder / name)
        super()._push_from_checkpoint(checkpoint_folder)
