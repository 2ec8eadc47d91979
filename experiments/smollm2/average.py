"""The mean of several adapters, weight by weight.

    python -m experiments.smollm2.average RUN RUN... --out OUT

Each run has the noise of its last few rows; the mean of runs that continue one another has less. It
prunes about as much as they do on average.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    average(args.runs, args.out)
    print(f"wrote {args.out}")


def average(runs: Sequence[Path], out: Path) -> None:
    """Write the mean of all runs' weights; settings are those of the last."""
    last = runs[-1]
    names = sorted(file.name for file in last.glob("*.safetensors"))
    means = {name: _mean([run / name for run in runs]) for name in names}
    if not means:
        raise PruneError(f"{last} holds no adapter; pass folders that kvprune train wrote")
    out.mkdir(parents=True, exist_ok=True)
    for name, data in means.items():
        write_atomically(out / name, data)
    for name in ("adapter_config.json", "recipe.yaml"):
        if (last / name).exists():
            shutil.copy(last / name, out / name)


def _mean(files: Sequence[Path]) -> bytes:
    if missing := [file for file in files if not file.is_file()]:
        raise PruneError(f"{missing[0]} does not exist; the runs must be of one kind")
    weights = [load_file(file) for file in files]
    shapes = [{name: tensor.shape for name, tensor in part.items()} for part in weights]
    if odd := [file for file, shape in zip(files, shapes, strict=True) if shape != shapes[0]]:
        raise PruneError(f"{odd[0]} differs in shape from {files[0]}; both must be of one kind")
    mean = {name: sum(part[name] for part in weights) / len(weights) for name in weights[0]}
    with safe_open(files[-1], framework="pt") as opened:
        return to_bytes(mean, metadata=opened.metadata())


if __name__ == "__main__":
    main()
