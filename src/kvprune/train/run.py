"""A recipe carried out: load, train, measure, save, describe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

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
from kvprune.train.recipe import Recipe, to_yaml
from kvprune.train.trainer import PruningTrainer
from kvprune.utils.files import write_atomically

RECIPE = "recipe.yaml"
# of the data's settings, those that name files of this machine: not for a card
PLACES = ("sources", "held_out_source", "cache_dir")


@dataclass(frozen=True)
class Trained:
    """What came out of a run."""

    folder: str
    steps: int
    metrics: dict[str, float]  # of the evaluation at the end


def run(
    recipe: Recipe,
    folder: str | Path,
    resume: bool = False,
    push: str | None = None,
    **arguments: Any,
) -> Trained:
    """Train by the recipe into the folder; `arguments` are further TrainingArguments.

    The folder holds the model or adapter, its card, the recipe, checkpoints, and the log for
    TensorBoard. With `resume` it goes on from the newest whole checkpoint. `push` is the name on
    the hub under which to publish it.
    """
    folder = Path(folder)
    found = last_whole_checkpoint(folder) if folder.exists() else None
    if found is not None and not resume:
        raise PruneError(
            f"{folder} holds a run already ({found.name}); go on with --resume, or choose "
            f"another folder with --out"
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
        model if recipe.start is None else _go_on(recipe, model),
        recipe.train,
        recipe.train.arguments(folder, hub_model_id=push, **arguments),
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        # weights that an earlier run changed are no teacher any more
        teacher=model if recipe.start and recipe.train.tune == "all" else None,
    )
    trainer.train(resume_from_checkpoint=True if found is not None else None)
    metrics: dict[str, float] = {}
    if data.held_out is not None:
        # the last step has been evaluated as a rule
        done = trainer.state.global_step
        metrics = trainer.last_evaluation(at_least=done) or trainer.evaluate()
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        write_atomically(folder / RECIPE, to_yaml(recipe).encode())
    settings = {k: v for k, v in recipe.to_dict()["data"].items() if k not in PLACES}
    card: dict[str, Any] = {
        "finetuned_from": recipe.model,
        "dataset": list(recipe.data.sources),
        "settings": {"data": settings},
    }
    if push:
        trainer.push_to_hub(**card)
    else:
        trainer.create_model_card(**card)
    return Trained(str(folder), trainer.state.global_step, metrics)


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


def _go_on(recipe: Recipe, model: PreTrainedModel) -> Pruned:
    """What an earlier run saved: its adapter on the base, or its whole model."""
    assert recipe.start is not None
    if not Path(recipe.start).is_dir():
        raise PruneError(f"{recipe.start} is no folder to go on from; name one of an earlier run")
    whole = is_full_model(Path(recipe.start))
    if whole != (recipe.train.tune == "all"):
        holds = "a whole model" if whole else "an adapter"
        raise PruneError(
            f"{recipe.start} holds {holds}, which tune={recipe.train.tune!r} cannot go on from; "
            f"train it as it was trained before"
        )
    pruned = load(recipe.start, dtype="float32") if whole else load(model, recipe.start)
    if (rank := lora.rank(pruned.model)) not in (None, recipe.train.lora_rank):
        raise PruneError(
            f"the LoRA in {recipe.start} has rank {rank}, but lora_rank is "
            f"{recipe.train.lora_rank}; they must be the same to go on"
        )
    return pruned
