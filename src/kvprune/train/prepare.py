"""From a model to one that is ready for training: pruning, LoRA, a teacher, scaled weights."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from kvprune.adapters import lora
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned, attach
from kvprune.train import spread
from kvprune.train.alpha import scheduled_alpha
from kvprune.train.config import TrainConfig
from kvprune.train.distill import frozen_copy
from kvprune.train.parameters import set_trainable

log = logging.getLogger(__name__)


def prepare(
    model: PreTrainedModel | Pruned, config: TrainConfig, teacher: PreTrainedModel | None
) -> tuple[Pruned, PreTrainedModel | None, Tensor]:
    """The pruned model, its teacher (None: itself, with pruning off), rate factors (L,)."""
    if isinstance(model, Pruned):
        check_pruned(model, config, teacher)
        pruned = model
    else:
        if advice := config.method.start_advice(scheduled_alpha(config, 0.0)):
            log.warning(advice)
        if config.distill and config.tune == "all" and teacher is None:
            teacher = frozen_copy(model)
        if config.dropout is not None:
            set_dropout(model, config.dropout)
        if config.tune == "lora":
            lora.add(model, config.lora_rank, config.lora_alpha)
        pruned = attach(model, config.method)
        if config.init_std is not None:
            rescale(pruned, config.init_std)
    if config.prunes and config.spread:
        factors = spread.factors(pruned)
        if pruned is not model:
            spread.scale(pruned, factors)
    else:
        factors = torch.ones(len(pruned.layers))
    set_trainable(pruned.model, config.tune)
    return pruned, teacher, factors


def set_dropout(model: PreTrainedModel, share: float) -> None:
    """Drop this share of activations in training, in all of the model's own layers."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = share
        # attention that drops by itself, by the names that transformers uses
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, share)


@torch.no_grad()
def rescale(pruned: Pruned, std: float) -> None:
    """Give new interaction weights this standard deviation; the draw stays the same.

    Scores of inputs of size 1 then have std²·width: 1 by default, 0.31 for 0.02 and a width of 768.
    """
    for interaction in pruned.interactions:
        for linear in (interaction.query, interaction.key):
            linear.weight.mul_(std * linear.in_features**0.5)  # type: ignore[union-attr, operator]


def check_pruned(pruned: Pruned, config: TrainConfig, teacher: PreTrainedModel | None) -> None:
    """Refuse a pruned model that the settings do not fit."""
    if pruned.config != config.method:
        raise PruneError(f"the model has {pruned.config}, but method is {config.method}")
    if config.tune == "lora" and not lora.has_lora(pruned.model):
        raise PruneError("LoRA must be added before pruning is attached; pass the plain model")
    if config.distill and config.tune == "all" and teacher is None:
        raise PruneError("pass teacher=: this model's weights may have changed since it was dense")


def check_arguments(args: TrainingArguments, config: TrainConfig, eval_dataset: Any) -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise PruneError("training needs the package accelerate: pip install 'kvprune[train]'")
    if args.n_gpu > 1:
        raise PruneError(
            f"one process would drive {args.n_gpu} GPUs with DataParallel, which copies the model "
            f"at each step and loses its gates; use `accelerate launch`, or select one GPU with "
            f"CUDA_VISIBLE_DEVICES=0"
        )
    if config.target_sparsity is not None and eval_dataset is None:
        raise PruneError(
            "target_sparsity needs an evaluation text to measure sparsity on; pass eval_dataset"
        )
