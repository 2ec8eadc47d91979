"""Carry out a recipe: load, train, evaluate, save, write the card."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback

from kvprune.adapters import lora
from kvprune.adapters.load import load
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.adapters.resolve import own_name, resolve
from kvprune.adapters.saved_file import is_full_model
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned
from kvprune.integration.host import max_positions
from kvprune.text.rows import load_rows
from kvprune.train.checkpoints import last_whole_checkpoint
from kvprune.train.recipe import RECIPE, Recipe, to_yaml
from kvprune.train.target import missed_target
from kvprune.train.trainer import PruningTrainer
from kvprune.utils.files import write_atomically

# data settings that name files of this machine: not for a card
LOCAL_PATHS = ("sources", "held_out_source", "cache_dir")


@dataclass(frozen=True)
class Trained:
    """The result of a run."""

    folder: str
    steps: int
    metrics: dict[str, float]  # of the evaluation at the end
    missed_target: str = ""  # by how much, if target_sparsity was set and not reached


def run(
    recipe: Recipe,
    folder: str | Path,
    resume: bool = False,
    push: str | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    **arguments: Any,
) -> Trained:
    """Train a recipe into the folder; `arguments` are further TrainingArguments.

    The folder gets the model or adapter, its card, the recipe, checkpoints, and the log for
    TensorBoard. `resume` continues from the newest complete checkpoint. `push` is the name on the
    hub to publish the result under.
    """
    folder = Path(folder)
    checkpoint = last_whole_checkpoint(folder) if folder.exists() else None
    if checkpoint is not None and not resume:
        raise PruneError(
            f"{folder} contains a run already ({checkpoint.name}); continue it with --resume, or "
            f"choose another folder with --out"
        )
    _refuse_adapter(recipe.model)
    model, tokenizer = load_base(recipe.model, "float32"), load_tokenizer(recipe.model)
    limit = max_positions(model)
    if limit is not None and recipe.data.length > limit:
        raise PruneError(
            f"rows of {recipe.data.length} tokens do not fit into the {limit} positions of "
            f"{recipe.model}; lower --length"
        )
    data = load_rows(recipe.data, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    if data.held_out is None:
        arguments = {"eval_strategy": "no", **arguments}
    trainer = PruningTrainer(
        model if recipe.start is None else _load_start(recipe, model),
        recipe.train,
        recipe.train.arguments(folder, hub_model_id=push, **arguments),
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        callbacks=list(callbacks),
        # weights that an earlier run changed cannot serve as the teacher
        teacher=model if recipe.start and recipe.train.tune == "all" else None,
    )
    trainer.train(resume_from_checkpoint=True if checkpoint is not None else None)
    metrics: dict[str, float] = {}
    if data.held_out is not None:
        # the last step has usually been evaluated
        step = trainer.state.global_step
        metrics = trainer.last_evaluation(at_least=step) or trainer.evaluate()
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        write_atomically(folder / RECIPE, to_yaml(recipe).encode())
    settings = {k: v for k, v in recipe.to_dict()["data"].items() if k not in LOCAL_PATHS}
    card: dict[str, Any] = {
        "finetuned_from": recipe.model,
        "dataset": list(recipe.data.sources),
        "settings": {"data": settings},
    }
    if push:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)
    missed = missed_target(recipe.train, metrics)
    return Trained(str(folder), trainer.state.global_step, metrics, missed)


def _refuse_adapter(name: str) -> None:
    """A base can be trained; what an adapter has learned would be silently left out."""
    if own_name(name) is not None:
        return
    location = resolve(name)
    if location.adapter is not None and location.fine_tuned_from is None:
        raise PruneError(
            f"cannot load the model {name!r} to train it: it is an adapter of {location.base}; "
            f"train {location.base}, with --start FOLDER to continue from an adapter's folder"
        )


def _load_start(recipe: Recipe, model: PreTrainedModel) -> Pruned:
    """The result of an earlier run: its adapter on the base, or its full model."""
    assert recipe.start is not None
    if not Path(recipe.start).is_dir():
        raise PruneError(
            f"{recipe.start} is not a folder to continue from; pass that of an earlier run"
        )
    is_full = is_full_model(Path(recipe.start))
    if is_full != (recipe.train.tune == "all"):
        kind = "a full model" if is_full else "an adapter"
        raise PruneError(
            f"{recipe.start} contains {kind}, which tune={recipe.train.tune!r} cannot continue; "
            f"use the same tune as the earlier run"
        )
    pruned = load(recipe.start, dtype="float32") if is_full else load(model, recipe.start)
    if (rank := lora.rank(pruned.model)) not in (None, recipe.train.lora_rank):
        raise PruneError(
            f"the LoRA in {recipe.start} has rank {rank}, but lora_rank is "
            f"{recipe.train.lora_rank}; they must be the same to continue"
        )
    return pruned
