"""The file of an adapter: interaction weights and configuration in one safetensors file.

Three kinds of folder hold one, distinguished by their other files:
    kvprune.safetensors alone               the interaction weights: a small adapter
    ... and adapter_model.safetensors       LoRA as well, in peft's own format
    ... and config.json, model.safetensors  a full fine-tuned model; plain transformers reads it
                                            as the dense model
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from kvprune.errors import PruneError
from kvprune.version import __version__

if TYPE_CHECKING:
    from torch import Tensor

FILE = "kvprune.safetensors"
FORMAT = 1


def is_full_model(folder: Path) -> bool:
    """Whether the folder holds all weights rather than an adapter."""
    return (folder / "config.json").is_file()


def read_about(file: Path) -> dict[str, Any]:
    """The metadata of a saved file: its configuration, and the model that it belongs to."""
    return _read(file, with_tensors=False)[0]


def read_file(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata and the tensors of a saved file."""
    return _read(file, with_tensors=True)


def _read(file: Path, with_tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not file.is_file():
        raise PruneError(f"{file} does not exist; pass the folder that Pruned.save was given")
    try:
        # the metadata alone without torch: a command checks a name before it imports it
        with safe_open(file, framework="pt" if with_tensors else "numpy") as opened:
            metadata = opened.metadata() or {}
            names = list(opened.keys()) if with_tensors else []
            tensors = {name: opened.get_tensor(name) for name in names}
        about = json.loads(metadata["kvprune"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise PruneError(f"{file} was not written by kvprune or is damaged: {error}") from error
    if about.get("format") != FORMAT:
        raise PruneError(
            f"{file} has format {about.get('format')!r}, written by kvprune "
            f"{about.get('version')}; this kvprune {__version__} reads format {FORMAT}"
        )
    return about, tensors
