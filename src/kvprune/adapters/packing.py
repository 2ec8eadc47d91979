"""Turn what training saved into an adapter of the package, with half the bytes."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor

from kvprune.adapters import lora, registry
from kvprune.adapters.registry import ABOUT, About, Entry, entries
from kvprune.adapters.saved_file import FILE, is_full_model
from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

LARGEST = 12 * 10**6  # bytes of weights
CARD = "README.md"


def pack(run: str | Path, name: str, about: About, folder: Path | None = None) -> Entry:
    """Copy the adapter of a training run into the registry, its matrices in bfloat16.

    Its base gets its public name: a path of the training machine means nothing elsewhere.
    """
    run, folder = Path(run), registry.FOLDER if folder is None else folder
    target = folder / name
    files = [file for file in (FILE, lora.WEIGHTS) if (run / file).is_file()]
    if FILE not in files or is_full_model(run):
        raise PruneError(
            f"{run} holds no adapter; train one with --tune interaction or --tune lora"
        )
    packed = {file: pack_file(run / file, about.base) for file in files}
    size = sum(map(len, packed.values()))
    if size > LARGEST:
        raise PruneError(
            f"{run} packs to {size / 1e6:.1f} MB, but at most {LARGEST / 1e6:.0f} are allowed; "
            f"lower --rank or --lora-rank"
        )
    target.mkdir(parents=True, exist_ok=True)
    for file, data in packed.items():
        write_atomically(target / file, data)
    if lora.is_saved_in(run):
        config = json.loads((run / lora.CONFIG).read_text(encoding="utf-8"))
        write_atomically(
            target / lora.CONFIG, _json({**config, "base_model_name_or_path": about.base})
        )
    if (run / CARD).is_file():
        shutil.copyfile(run / CARD, target / CARD)
    write_atomically(target / ABOUT, _json(asdict(about)))
    return next(entry for entry in entries(folder) if entry.name == name)


def pack_file(file: Path, base: str | None = None) -> bytes:
    """The file with its matrices in bfloat16; `base`: the new name of the base in its metadata."""
    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata() or {})
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if base is not None and "kvprune" in metadata:
        about = json.loads(metadata["kvprune"])
        about["base"]["name"] = base
        metadata["kvprune"] = json.dumps(about, sort_keys=True)
    return to_bytes({name: _half(tensor) for name, tensor in tensors.items()}, metadata=metadata)


def _half(tensor: Tensor) -> Tensor:
    # β is one number per layer: nothing to gain there
    return tensor.to(torch.bfloat16) if tensor.dim() == 2 else tensor


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()
