"""kvprune train: fine-tune a pretrained model with pruning or a baseline."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from kvprune.cli.names import OptionalModelName
from kvprune.cli.options import options_of, with_options
from kvprune.methods import METHODS
from kvprune.text.config import DataConfig
from kvprune.train.config import TrainConfig
from kvprune.utils.malloc import keep_memory
from kvprune.utils.processes import is_main

METHOD = tuple(method for method in METHODS.values() if method.trainable)
# the help in parts; a field that is missing here would end up among the options of the run
PANELS = {
    "How much is pruned": (
        "gamma", "target_sparsity", "alpha_start", "alpha_end", "alpha_schedule", "alpha_share",
    ),
    "What is trained": (
        "tune", "interaction_lr", "base_lr", "lr_schedule", "warmup", "max_grad_norm", "average",
        "init_std", "dropout",
        "distill", "teacher_cache", "lora_rank", "lora_alpha",
    ),
    "Steps": ("steps", "batch", "accumulation", "seed"),
    "Measuring and saving": (
        "log_every", "probe_every", "probe_rows", "eval_every", "save_every", "keep_checkpoints",
    ),
    "Text": (
        "length", "held_out", "held_out_source", "text_field", "rows_per_document", "max_tokens",
        "cache_dir",
    ),
    "Method": (
        "rank", "beta", "gate", "protect_first", "protect_recent", "threshold", "window", "stride",
    ),
}  # fmt: skip
PANEL = {name: panel for panel, names in PANELS.items() for name in names}


@with_options(
    options_of(TrainConfig, ("method",), PANEL),
    options_of(DataConfig, ("sources", "seed"), PANEL),
    *(options_of(config, ("alpha",), PANEL) for config in METHOD),
)
def train(
    model: OptionalModelName = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Text: files, folders, hub datasets; repeatable.", metavar="TEXT"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("kvprune-run"),
    recipe: Annotated[
        Path | None, typer.Option(help="A YAML file; options override its settings.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="pruning, dense, local or strided.", show_default="pruning")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(help="Continue from an earlier run's folder, with other settings."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Resume from the latest checkpoint.")] = False,
    push: Annotated[
        str | None, typer.Option(help="Publish the result on the hub as OWNER/NAME.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **options: Any,
) -> None:
    """Fine-tune a model so that it prunes its cache; the same command trains the baselines."""
    given = {name: value for name, value in options.items() if value is not None}
    over: dict[str, Any] = {
        "train": _taken(given, TrainConfig),
        "data": _taken(given, DataConfig),
        "method": {name: given[name] for config in METHOD for name in _taken(given, config)},
    }
    if "seed" in given:
        over["data"]["seed"] = given["seed"]
    if model is not None:
        over["model"] = model
    if start is not None:
        over["start"] = start
    if data:
        over["data"]["sources"] = tuple(data)
    if method is not None:
        over["method"]["method"] = method

    from kvprune.train.recipe import make_recipe, merge_settings, read_yaml
    from kvprune.train.run import run

    keep_memory()
    chosen = make_recipe(merge_settings(read_yaml(recipe) if recipe else {}, over))
    result = run(chosen, out, resume, push)
    if not is_main():
        return
    if result.missed_target:
        print(f"kvprune: {result.missed_target}", file=sys.stderr)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    print(f"{result.folder}: {result.steps} steps")
    for name in ("ppl", "sparsity"):
        for gate in ("soft", "hard"):
            if (key := f"eval_{name}_{gate}") in result.metrics:
                print(f"  {name} {gate:5} {result.metrics[key]:.4g}")


def _taken(given: dict[str, Any], config: type[Any]) -> dict[str, Any]:
    names = {field.name for field in fields(config)}
    return {name: value for name, value in given.items() if name in names}
