"""An adapter in half the bytes: LoRA and interaction weights in bfloat16.

    python -m experiments.smollm2.shrink ADAPTER OUT

They were trained in float32, and are float32 again when loaded. β stays float32: it is one number
per layer, and all of its votes depend on it.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from kvprune.adapters.packing import pack_file
from kvprune.errors import PruneError
from kvprune.utils.files import write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("adapter", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    before, after = shrink(args.adapter, args.out)
    print(f"{args.adapter}: {before / 1e6:.2f} MB; {args.out}: {after / 1e6:.2f} MB")


def shrink(adapter: Path, out: Path) -> tuple[int, int]:
    """Write the smaller copy; returns the bytes of all weights before and after."""
    files = sorted(adapter.glob("*.safetensors"))
    if not files or (adapter / "config.json").exists():
        raise PruneError(f"{adapter} is no adapter; pass a folder that was trained with LoRA")
    if out.resolve() == adapter.resolve():
        raise PruneError(f"{out} would overwrite the adapter itself; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        write_atomically(out / file.name, pack_file(file))
    for name in ("adapter_config.json", "README.md", "recipe.yaml"):
        if (adapter / name).exists():
            shutil.copy(adapter / name, out / name)
    return weight_bytes(adapter), weight_bytes(out)


def weight_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


if __name__ == "__main__":
    main()
