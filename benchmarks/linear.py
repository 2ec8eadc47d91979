"""How much faster does our kernel multiply a few rows by a layer's weights than torch?

Decoding reads every weight once for one token per row, so the floor is the time to read them.
Shapes of SmolLM2-135M (an MLP's up projection, 30 different ones in turn, so that none is in a
cache), two dtypes, 1 to 64 rows; packed: weights in oneDNN's order, where the CPU has bfloat16.
"""

import statistics
from functools import partial

import torch
import torch.nn.functional as F

from harness import arguments, interleave, ratio, report
from kvprune.ops.linear import linear
from kvprune.ops.linear.packed import Packed, can_pack

SHAPE, LAYERS = (1536, 576), 30
ROWS = (1, 2, 4, 8, 16, 32, 64)
OWN_ROWS = 8  # more, and our kernel is far behind


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
        packed = [Packed(weight) for weight in weights if can_pack(weight)]
        nbytes = sum(w.numel() * w.element_size() for w in weights)
        for count in ROWS:
            x = torch.randn(count, SHAPE[1]).to(dtype)
            calls = {"torch": partial(each, F.linear, x, weights)}
            if count <= OWN_ROWS:
                calls["kvprune"] = partial(each, linear, x, weights)
            if packed:
                calls["packed"] = partial(each, lambda x, weight: weight.linear(x, None), x, packed)
            with torch.no_grad():
                seconds = interleave(repeats, calls, warmup=1)
            for kind in seconds.keys() - {"torch"}:
                prefix = "linear" if kind == "kvprune" else "packed"
                ratios[f"{prefix}_{name}_m{count}"] = ratio(seconds["torch"], seconds[kind])
            for kind, times in seconds.items():
                milliseconds = statistics.median(times) * 1e3
                speed = nbytes / milliseconds / 1e6
                rows.append([name, count, kind, milliseconds, speed])
                details[f"{kind}_{name}_m{count}_gb_per_s"] = round(speed, 2)
    report(args, ratios, ["weights", "rows", "by", "ms, 30 layers", "GB/s read"], rows, details)


if __name__ == "__main__":
    main()
