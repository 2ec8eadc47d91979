"""Small runs that several tests of training share."""

from pathlib import Path
from typing import Any

import torch

import zoo
from kvprune import PruningConfig
from kvprune.train import PruningTrainer, TrainConfig


def rows(count: int, length: int = 32, seed: int = 0, padded: bool = False) -> list[dict]:
    """Rows to learn from: every token follows from the one before, with some noise."""
    generator = torch.Generator().manual_seed(seed)
    follows = torch.randperm(98, generator=torch.Generator().manual_seed(7)) + 3
    made = []
    for i in range(count):
        ids = [int(torch.randint(3, 101, (1,), generator=generator))]
        for _ in range(length - 1):
            noise = torch.rand(1, generator=generator) < 0.1
            drawn = int(torch.randint(3, 101, (1,), generator=generator))
            ids.append(drawn if noise else int(follows[ids[-1] - 3]))
        row = {"input_ids": ids, "labels": list(ids)}
        if padded:
            pads = (5 * i) % (length // 2)
            real = [1] * (length - pads) + [0] * pads
            row["attention_mask"] = real
            row["labels"] = [t if r else -100 for t, r in zip(ids, real, strict=True)]
        made.append(row)
    return made


def model(family: str = "gpt2", **overrides):
    layers = {"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2}
    return zoo.make(family, **(layers | overrides))


def config(**settings: Any) -> TrainConfig:
    usual = {
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
    return TrainConfig(**(usual | settings))


def trainer(folder: Path, *, of=None, data=None, arguments=None, **settings: Any) -> PruningTrainer:
    """A trainer without bars; `arguments` are more of TrainingArguments."""
    made = config(**settings)
    data = rows(24) if data is None else data
    quiet = {"disable_tqdm": True, "report_to": [], "dataloader_pin_memory": False}
    quiet |= {"use_cpu": True}
    return PruningTrainer(
        model() if of is None else of,
        made,
        made.arguments(folder, **(quiet | (arguments or {}))),
        train_dataset=data,
        eval_dataset=rows(6, seed=1),
    )


def weights(made: PruningTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in made.pruned.model.named_parameters()}


def losses(made: PruningTrainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]
