"""An adapter between two others: the weighted mean of their weights.

    python experiments/smollm2/average.py FIRST SECOND OUT --share 0.6

Of two runs, the second going on from the first: on the way from one to the other lies a model that
prunes as much as is wanted, and the mean of two late points of a training is often better than
either for its sparsity. `share` is that of the second.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save as to_bytes

from kvprune.errors import PruneError
from kvprune.files import write_whole


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("first", "second", "out"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--share", type=float, default=0.5, help="of the second, 0 to 1")
    args = parser.parse_args()
    average(args.first, args.second, args.share, args.out)
    print(f"wrote {args.out}")


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Write out = (1 − share) · first + share · second; all else is the second's."""
    if not 0 <= share <= 1:
        raise PruneError(f"share={share} is not between 0 and 1")
    names = sorted(file.name for file in second.glob("*.safetensors"))
    if not names or names != sorted(file.name for file in first.glob("*.safetensors")):
        raise PruneError(f"{first} and {second} are no two adapters of the same kind")
    made = {name: _mean(first / name, second / name, share) for name in names}
    out.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        write_whole(out / name, data)
    for name in ("adapter_config.json", "recipe.yaml"):
        if (second / name).exists():
            shutil.copy(second / name, out / name)


def _mean(first: Path, second: Path, share: float) -> bytes:
    with safe_open(first, framework="pt") as a, safe_open(second, framework="pt") as b:
        shapes = [{k: f.get_slice(k).get_shape() for k in f.keys()} for f in (a, b)]  # noqa: SIM118
        if shapes[0] != shapes[1]:
            raise PruneError(f"{first} and {second} hold different weights; train both alike")
        mean = {k: (1 - share) * a.get_tensor(k) + share * b.get_tensor(k) for k in shapes[0]}
        return to_bytes(mean, metadata=b.metadata())


if __name__ == "__main__":
    main()
