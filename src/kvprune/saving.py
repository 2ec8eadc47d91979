"""Interaction weights and configuration in one safetensors file, written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from transformers import PreTrainedModel

from kvprune.config import from_dict, to_dict
from kvprune.errors import PruneError
from kvprune.pruned import Pruned, attach
from kvprune.version import __version__

if TYPE_CHECKING:
    pass

FILE = "kvprune.safetensors"
FORMAT = 1


def save(pruned: Pruned, path: str | Path) -> Path:
    """Write FILE into the folder `path`, made if need be."""
    tensors = _tensors(pruned)
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise PruneError(
                f"{name} holds NaN or Inf: not saved; go back to an earlier checkpoint"
            )
    about = {
        "format": FORMAT,
        "version": __version__,
        "config": to_dict(pruned.config),
        "base": _base(pruned.model),
        "layers": [layer.name for layer in pruned.layers],
    }
    # the configuration travels inside the one file, so that the two cannot come apart
    data = to_bytes(tensors, metadata={"kvprune": json.dumps(about, sort_keys=True)})
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / FILE, data)
    return folder / FILE


def load(model: PreTrainedModel, path: str | Path) -> Pruned:
    """Attach what `save` wrote, to a model of the same shape. Nothing is attached on an error."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    about, tensors = read(file)
    config = from_dict(about["config"])
    theirs, ours = about["base"], _base(model)
    for what in ("model_type", "hidden_size"):
        if theirs[what] != ours[what]:
            raise PruneError(
                f"{file} was saved for {what} {theirs[what]!r} ({theirs['name']}), but this model "
                f"has {ours[what]!r}; load it into the model that it was trained on"
            )
    pruned = attach(model, config)
    try:
        _fill(pruned, tensors, file)
    except PruneError:
        pruned.detach()
        raise
    return pruned


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


def write_whole(file: Path, data: bytes) -> None:
    """Write beside the file, flush to disk, then rename: readers see the old or the new."""
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        # mkstemp makes a private file; a saved one gets the ordinary mode
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _tensors(pruned: Pruned) -> dict[str, Tensor]:
    return {
        f"{layer.name}.{name}": tensor.detach().cpu().contiguous()
        for layer in pruned.layers
        if layer.interaction is not None
        for name, tensor in layer.interaction.state_dict().items()
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


def _base(model: PreTrainedModel) -> dict[str, Any]:
    config = model.config.get_text_config()
    return {
        "name": model.config.name_or_path or type(model).__name__,
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
    }
