"""From what training saved to an adapter of the package: half the bytes, and what it is."""

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

from kvprune.adapters import lora, registry, saving
from kvprune.adapters.registry import ABOUT, About, Entry, entries
from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically

LARGEST = 12 * 10**6  # bytes of weights
CARD = "README.md"


def pack(run: str | Path, name: str, about: About, folder: Path | None = None) -> Entry:
    """Copy the adapter of a training run into the registry, its matrices in bfloat16.

    The names of its base become public ones: a path on the machine of training is nobody's.
    """
    run, folder = Path(run), registry.FOLDER if folder is None else folder
    target = folder / name
    files = [file for file in (saving.FILE, lora.WEIGHTS) if (run / file).is_file()]
    if saving.FILE not in files or (run / "config.json").is_file():
        raise PruneError(
            f"{run} holds no adapter; train one with --tune interaction or --tune lora"
        )
    packed = {file: halved(run / file, about.base) for file in files}
    size = sum(map(len, packed.values()))
    if size > LARGEST:
        raise PruneError(
            f"{run} packs to {size / 1e6:.1f} MB, and an adapter may have {LARGEST / 1e6:.0f}; "
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


def halved(file: Path, base: str | None = None) -> bytes:
    """The weights with their matrices in bfloat16; `base`: what they are to call their base."""
    with safe_open(file, framework="pt") as opened:
        metadata = dict(opened.metadata() or {})
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    if base is not None and "kvprune" in metadata:
        known = json.loads(metadata["kvprune"])
        known["base"]["name"] = base
        metadata["kvprune"] = json.dumps(known, sort_keys=True)
    return to_bytes({name: _half(tensor) for name, tensor in tensors.items()}, metadata=metadata)


def _half(tensor: Tensor) -> Tensor:
    # β is one number a layer: nothing to save there
    return tensor.to(torch.bfloat16) if tensor.dim() == 2 else tensor


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=1, sort_keys=True) + "\n").encode()
