"""Small training runs that several tests share."""

from pathlib import Path
from typing import Any

import torch

import zoo
from kvprune import PruningConfig
from kvprune.train import PruningTrainer, TrainConfig


def make_rows(count: int, length: int = 32, seed: int = 0, padded: bool = False) -> list[dict]:
    """Rows to train on: every token is determined by the previous one, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    successor = torch.randperm(98, generator=torch.Generator().manual_seed(7)) + 3
    rows: list[dict] = []
    for i in range(count):
        ids = [int(torch.randint(3, 101, (1,), generator=generator))]
        for _ in range(length - 1):
            noise = torch.rand(1, generator=generator) < 0.1
            drawn = int(torch.randint(3, 101, (1,), generator=generator))
            ids.append(drawn if noise else int(successor[ids[-1] - 3]))
        row = {"input_ids": ids, "labels": list(ids)}
        if padded:
            pads = (5 * i) % (length // 2)
            real = [1] * (length - pads) + [0] * pads
            row["attention_mask"] = real
            row["labels"] = [t if r else -100 for t, r in zip(ids, real, strict=True)]
        rows.append(row)
    return rows


def small_model(family: str = "gpt2", **overrides):
    layers = {"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2}
    return zoo.make(family, **(layers | overrides))


def make_config(**settings: Any) -> TrainConfig:
    defaults = {
        "method": PruningConfig(rank=8),
        "steps": 6,
        "batch": 4,
        "log_every": 1,
        "probe_every": 2,
        "probe_rows": 2,
        "eval_every": 3,
        "save_every": 3,
        "interaction_lr": 1e-2,
        "base_lr": 1e-3,
    }
    return TrainConfig(**(defaults | settings))


def make_trainer(
    folder: Path, *, model=None, data=None, arguments=None, **settings: Any
) -> PruningTrainer:
    """A trainer without progress bars; `arguments` are further TrainingArguments."""
    config = make_config(**settings)
    data = make_rows(24) if data is None else data
    quiet = {"disable_tqdm": True, "report_to": [], "dataloader_pin_memory": False}
    quiet |= {"use_cpu": True}
    return PruningTrainer(
        small_model() if model is None else model,
        config,
        config.arguments(folder, **(quiet | (arguments or {}))),
        train_dataset=data,
        eval_dataset=make_rows(6, seed=1),
    )


def weights(trainer: PruningTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.pruned.model.named_parameters()}


def logged(trainer: PruningTrainer, name: str = "loss") -> list[float]:
    """The values of one metric, in the order of the log."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
