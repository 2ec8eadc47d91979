"""A GPU's numbers, ready to paste into an issue: right first, then decode, prompts and training.

python benchmarks/gpu.py                  some minutes; writes gpu.json, gpu.md and gpu.png
python benchmarks/gpu.py --dry-run        the same program on the CPU at tiny sizes: no time counts
python benchmarks/gpu.py --only decode    one part

Nothing is timed before it was compared with plain torch: exit code 1 if ours is wrong, and 2
without a GPU. Theirs: SDPA as torch chooses, its flash kernel alone, FlexAttention compiled,
transformers with a DynamicCache, and with a StaticCache, compiled.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

PARTS = ("launch", "decode", "model", "prefill", "train", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda (ROCm too), cuda:1, or cpu")
    parser.add_argument("--dry-run", action="store_true", help="--device cpu")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, such as decode,train")
    parser.add_argument("--rounds", type=int, help="how often each is timed")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder for files")
    parser.add_argument("--json", action="store_true", help="print the object, not the table")
    args = parser.parse_args()
    parts = args.only.split(",")
    if unknown := sorted(set(parts) - set(PARTS)):
        parser.error(f"--only {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    name = "cpu" if args.dry_run else args.device

    # before torch, so that idle threads sleep
    import kvprune  # noqa: F401 I001
    import torch

    if name != "cpu" and not torch.cuda.is_available():
        print(
            "gpu.py: torch finds no GPU here (CUDA or ROCm), so there is nothing to measure; "
            "--dry-run runs the program on the CPU at tiny sizes, to see that it works",
            file=sys.stderr,
        )
        sys.exit(2)
    from on_gpu import paste
    from on_gpu.correct import problems
    from on_gpu.measure import measure
    from on_gpu.sizes import sizes_for

    device = torch.device(name)
    sizes = sizes_for(device, args.rounds)
    print("comparing with plain torch ...", file=sys.stderr)
    if found := problems(device, sizes):
        print("\n".join(["nothing was timed, because results are wrong:", *found]), file=sys.stderr)
        sys.exit(1)
    with torch.no_grad():
        rows = measure(device, sizes, parts, lambda part: print(f"{part} ...", file=sys.stderr))
    command = shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]])
    result = paste.result(device, sizes, rows, command)
    for file in paste.write(result, args.out):
        print(f"wrote {file}", file=sys.stderr)
    print(json.dumps(result) if args.json else paste.markdown(result))
    if any(row["problem"].startswith("wrong") for row in rows if row["who"].startswith("kvprune")):
        sys.exit(1)


if __name__ == "__main__":
    main()
