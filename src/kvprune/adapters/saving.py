"""Interaction weights and configuration in one safetensors file, written whole or not at all.

Three kinds of folder, told apart by what else lies in them:
    kvprune.safetensors alone               the interaction weights: a small adapter
    ... and adapter_model.safetensors       LoRA too, in peft's own format
    ... and config.json, model.safetensors  a whole fine-tuned model; plain transformers reads it
                                            as the dense model
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import PreTrainedModel

from kvprune.adapters import lora, registry, source
from kvprune.adapters.pretrained import load_base
from kvprune.config import from_dict, to_dict
from kvprune.errors import PruneError
from kvprune.integration.handle import Pruned, attach
from kvprune.utils.files import write_atomically
from kvprune.version import __version__

log = logging.getLogger(__name__)

FILE = "kvprune.safetensors"
FORMAT = 1


def save(pruned: Pruned, path: str | Path, state: dict[str, Tensor] | None = None) -> Path:
    """Write FILE, and LoRA if the model has it, into the folder `path`, made if need be.

    `state`: the model's gathered state dict, where its own parameters are shards.
    """
    tensors = _tensors(pruned, state)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise PruneError(
                f"{name} holds NaN or Inf: not saved; go back to an earlier checkpoint"
            )
    about = {
        "format": FORMAT,
        "version": __version__,
        "config": to_dict(pruned.config),
        "base": base_of(pruned.model),
        "layers": [layer.name for layer in pruned.layers],
    }
    # the configuration travels inside the one file, so that the two cannot come apart
    data = to_bytes(tensors, metadata={"kvprune": json.dumps(about, sort_keys=True)})
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    if lora.has_lora(pruned.model):
        lora.save(pruned.model, folder, state)
    write_atomically(folder / FILE, data)
    return folder / FILE


def load(
    model: PreTrainedModel | str | Path,
    path: str | Path | None = None,
    merge: bool = False,
    dtype: str = "auto",
) -> Pruned:
    """Attach what `Pruned.save` or the trainer wrote. Nothing is attached on an error.

    load(model, folder)   onto a model of the same shape
    load(name, folder)    onto a model from a folder or the hub
    load(folder)          a whole model from its folder; for an adapter, the model it was trained on
    load("smollm2-135m")  an adapter of the package on its base: `kvprune models` lists them
    `folder` may be a name on the hub, too. LoRA stays apart from the weights, and detach takes it
    off again; merge=True folds it in, which is faster and cannot be undone. `dtype`: of a model
    that is given by name; auto keeps what its file has.
    """
    if path is None:
        if isinstance(model, PreTrainedModel):
            raise PruneError("load(model) lacks the folder to load from: load(model, folder)")
        path = model
        file = _file(path)
        model = file.parent if is_whole(file.parent) else read(file)[0]["base"]["name"]
    else:
        file = _file(path)
        elsewhere = not isinstance(model, PreTrainedModel) and Path(model).resolve()
        if elsewhere and is_whole(file.parent) and elsewhere != file.parent.resolve():
            raise PruneError(
                f"{path} holds a whole fine-tuned model, so {model} is not needed; "
                f"load it with kvprune.load({str(path)!r})"
            )
    about, tensors = read(file)
    config = from_dict(about["config"])
    if not isinstance(model, PreTrainedModel):
        model = load_base(model, dtype)
    theirs, ours = about["base"], base_of(model)
    for what in ("model_type", "hidden_size"):
        if theirs[what] != ours[what]:
            raise PruneError(
                f"{file} was saved for {what} {theirs[what]!r} ({theirs['name']}), but this model "
                f"has {ours[what]!r}; load it into the model that it was trained on"
            )
    with_lora = lora.is_saved_in(file.parent)
    if with_lora:
        lora.load(model, file.parent)
    try:
        if with_lora and merge:
            lora.merge(model)
        pruned = attach(model, config)
        try:
            _fill(pruned, tensors, file)
        except PruneError:
            pruned.detach()
            raise
    except PruneError:
        if with_lora and not merge:
            lora.remove(model)
        raise
    if with_lora and not merge:
        pruned.on_detach(lora.remove)
    return pruned


def fill(pruned: Pruned, path: str | Path) -> None:
    """Take the numbers that `save` wrote into a model that is attached already."""
    file = _file(path)
    _fill(pruned, read(file)[1], file)
    if lora.has_lora(pruned.model):
        lora.fill(pruned.model, file.parent)


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a saved file says of itself, and its tensors."""
    if not file.is_file():
        raise PruneError(f"{file} does not exist; pass the folder that Pruned.save was given")
    try:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = json.loads(metadata["kvprune"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise PruneError(f"{file} is not a file of kvprune's or is damaged: {error}") from error
    if about.get("format") != FORMAT:
        raise PruneError(
            f"{file} has format {about.get('format')!r}, written by kvprune "
            f"{about.get('version')}; this kvprune {__version__} reads format {FORMAT}"
        )
    return about, tensors


def _file(path: str | Path) -> Path:
    """The saved file: of the package, in a folder, itself, or in a repository on the hub."""
    if entry := registry.find_adapter(str(path)):
        source.compare(entry)
        return entry.folder / FILE
    local = Path(path)
    if local.is_dir():
        return local / FILE
    if not local.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(str(path))) / FILE
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            reason = str(error).strip().splitlines()[0]
            raise PruneError(
                f"{path} does not exist, neither as a folder nor on the hub: {reason}"
            ) from error
    return local


def is_whole(folder: Path) -> bool:
    """Whether the folder holds all weights, and not an adapter."""
    return (folder / "config.json").is_file()


def _tensors(pruned: Pruned, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    if state is not None:
        state = {name.replace(".interaction.", "."): t for name, t in state.items()}
    return {
        # β has another shape while FSDP shards the model
        name: (tensor if state is None else state[name]).detach().cpu().contiguous().squeeze()
        for layer in pruned.layers
        if layer.interaction is not None
        for name, tensor in layer.interaction.state_dict(prefix=f"{layer.name}.").items()
    }


def _fill(pruned: Pruned, tensors: dict[str, Tensor], file: Path) -> None:
    own = _tensors(pruned)
    if missing := sorted(set(own) ^ set(tensors)):
        raise PruneError(
            f"{file} holds {len(tensors)} tensors and this model needs {len(own)}; "
            f"the first that differs is {missing[0]}: it was saved for another model"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise PruneError(
                f"{name} in {file} has shape {tuple(tensor.shape)}, but this model needs "
                f"{tuple(own[name].shape)}: it was saved for another model"
            )
        if not tensor.isfinite().all():
            raise PruneError(f"{name} in {file} holds NaN or Inf; save it again from good weights")
    for layer in pruned.layers:
        if layer.interaction is not None:
            with torch.no_grad():
                for name, tensor in layer.interaction.state_dict().items():
                    tensor.copy_(tensors[f"{layer.name}.{name}"])


def base_of(model: PreTrainedModel) -> dict[str, Any]:
    """What a saved file says of the model that it belongs to."""
    config = model.config.get_text_config()
    return {
        "name": model.config.name_or_path or type(model).__name__,
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
    }
