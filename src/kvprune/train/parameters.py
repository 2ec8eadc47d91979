"""Which parameters are trained, and how fast: two rates, and a factor per layer's interaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.integration.handle import Pruned
from kvprune.train.config import TrainConfig, Tune

INTERACTION = ".interaction."  # in the name of every interaction weight
WEIGHTS = ("query.weight", "key.weight")  # of the interaction: a score is a product of both

Rate = tuple[str, float]  # its name in the log, and its value


def set_trainable(model: nn.Module, tune: Tune) -> None:
    for name, parameter in model.named_parameters():
        trained = tune == "all" or INTERACTION in name or (tune == "lora" and ".lora_" in name)
        parameter.requires_grad_(trained and parameter.is_floating_point())


def parameter_groups(
    optimizer: torch.optim.Optimizer, rates: dict[int, Rate]
) -> Iterator[dict[str, Any]]:
    """The optimizer's groups, split by learning rate; `rates` are by the id of the parameter."""
    for group in optimizer.param_groups:
        by_rate: dict[Rate, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rates[id(parameter)], []).append(parameter)
        for (name, rate), parameters in by_rate.items():
            yield {**group, "params": parameters, "lr": rate, "name": name}


def learning_rates(
    model: nn.Module, pruned: Pruned, factors: Tensor, config: TrainConfig
) -> dict[int, Rate]:
    """The rate of each parameter, by its id; `factors` (L,) are those of `spread`.

    `model` is `pruned.model`, or what FSDP or torch.compile have wrapped around it.
    """
    base, interaction = ("base", config.base_lr), ("interaction", config.interaction_lr)
    scaled = {
        f"{layer.name}{INTERACTION}{weight}": (f"interaction_layer_{number}", rate)
        for number, layer in enumerate(pruned.layers)
        for rate in [config.interaction_lr * float(factors[number])]
        for weight in WEIGHTS
    }
    rates = {}
    for name, parameter in model.named_parameters():
        # wrappers insert their own names
        plain = name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")
        default = interaction if INTERACTION in plain else base
        rates[id(parameter)] = scaled.get(plain.removeprefix("module."), default)
    return rates


def rate_metrics(optimizer: torch.optim.Optimizer | None) -> dict[str, float]:
    """The two rates as they are logged; those of single layers follow from `interaction`."""
    groups = optimizer.param_groups if optimizer else []
    names = ("interaction", "base")
    return {f"lr_{g['name']}": float(g["lr"]) for g in groups if g.get("name") in names}
