"""How much faster does our kernel multiply a few rows by a layer's weights than torch?

Decoding reads every weight once for one token per row, so the floor is the time to read them.
Shapes of SmolLM2-135M (an MLP's up projection, 30 different ones in turn, so that none is in a
cache), two dtypes, 1 to 8 rows; torch is asked where our kernel is not used.
"""

import statistics
from functools import partial

import torch
import torch.nn.functional as F

from harness import arguments, interleave, ratio, report
from kvprune.ops.linear import linear

SHAPE, LAYERS = (1536, 576), 30
ROWS = (1, 2, 4, 8)


def each(function, x, weights) -> None:
    for weight in weights:
        function(x, weight)


def main() -> None:
    args = arguments(__doc__).parse_args()
    repeats = {"quick": 1, "bench": 9}.get(args.sizes, 25)
    ratios, rows, details = {}, [], {"shape": SHAPE, "layers": LAYERS, "repeats": repeats}
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        weights = [torch.randn(SHAPE).to(dtype) for _ in range(LAYERS)]
        nbytes = sum(w.numel() * w.element_size() for w in weights)
        for count in ROWS:
            x = torch.randn(count, SHAPE[1]).to(dtype)
            calls = {
                "kvprune": partial(each, linear, x, weights),
                "torch": partial(each, F.linear, x, weights),
            }
            with torch.no_grad():
                seconds = interleave(repeats, calls, warmup=1)
            ratios[f"linear_{name}_m{count}"] = ratio(seconds["torch"], seconds["kvprune"])
            for kind, times in seconds.items():
                milliseconds = statistics.median(times) * 1e3
                speed = nbytes / milliseconds / 1e6
                rows.append([name, count, kind, milliseconds, speed])
                details[f"{kind}_{name}_m{count}_gb_per_s"] = round(speed, 2)
    report(args, ratios, ["weights", "rows", "by", "ms, 30 layers", "GB/s read"], rows, details)


if __name__ == "__main__":
    main()
