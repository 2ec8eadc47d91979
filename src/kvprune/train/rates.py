"""Which parameter learns how fast: two rates, and a factor for each layer's interaction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvprune.integration.layer import Layer
from kvprune.train.config import TrainConfig
from kvprune.train.saves import INTERACTION

Rate = tuple[str, float]  # what it is called in the log, and how large it is
WEIGHTS = ("query.weight", "key.weight")  # of the interaction: a score is a product of both


def rates(
    model: nn.Module, layers: list[Layer], factors: Tensor, config: TrainConfig
) -> dict[int, Rate]:
    """Of each parameter, by its id; `factors` (L,) are those of `spread`."""
    base, interaction = ("base", config.base_lr), ("interaction", config.interaction_lr)
    own = {
        f"{layer.name}{INTERACTION}{weight}": (f"{interaction[0]}_layer_{number}", rate)
        for number, layer in enumerate(layers)
        for rate in [interaction[1] * float(factors[number])]
        for weight in WEIGHTS
    }
    found = {}
    for name, parameter in model.named_parameters():
        # wrappers put their own names in between
        plain = name.replace("_fsdp_wrapped_module.", "").replace("_orig_mod.", "")
        usual = interaction if INTERACTION in plain else base
        found[id(parameter)] = own.get(plain.removeprefix("module."), usual)
    return found


def split(
    optimizer: torch.optim.Optimizer, by_parameter: dict[int, Rate]
) -> Iterator[dict[str, Any]]:
    """Each group of parameters as several, by the name of their rate."""
    for group in optimizer.param_groups:
        parts: dict[Rate, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            parts.setdefault(by_parameter[id(parameter)], []).append(parameter)
        for (name, rate), params in parts.items():
            yield {**group, "params": params, "lr": rate, "name": name}
