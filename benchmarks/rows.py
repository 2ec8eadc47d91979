"""What does a row cost that joins or leaves: its own survivors, or the batch around it?"""

import time

import torch

import harness
from kvprune.evaluate.throughput.decoding import filled_cache
from models import attached, gpt2

# (survivors of the row, rows beside it)
SETTINGS = [(200, 1), (200, 64), (800, 1), (800, 64)]


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    repeats = {"quick": 5, "bench": 15, "full": 40}[args.sizes]
    pruned = attached(gpt2("float32", quick=args.sizes == "quick"))
    scenes = {setting: Scene(pruned, *setting) for setting in SETTINGS}
    times = {(setting, what): [] for setting in SETTINGS for what in ("join", "leave")}
    for _ in range(repeats):
        for setting, scene in scenes.items():
            joined, left = scene.join_and_leave()
            times[setting, "join"].append(joined)
            times[setting, "leave"].append(left)
    median = {key: sorted(values)[len(values) // 2] for key, values in times.items()}
    both = {setting: median[setting, "join"] + median[setting, "leave"] for setting in SETTINGS}
    ratios = {"join_and_leave_64_rows_vs_1": both[800, 64] / both[800, 1]}
    for what in ("join", "leave"):
        ratios[f"{what}_64_rows_vs_1"] = median[(800, 64), what] / median[(800, 1), what]
        ratios[f"{what}_800_tokens_vs_200"] = median[(800, 64), what] / median[(200, 64), what]
    rows = [
        [what, tokens, beside, median[(tokens, beside), what] * 1e3]
        for what in ("join", "leave")
        for tokens, beside in SETTINGS
    ]
    details = {f"{what}_{s}_{b}_ms": value * 1e3 for ((s, b), what), value in median.items()}
    columns = ["what", "survivors", "rows beside", "ms"]
    harness.report(args, ratios, columns, rows, {"layers": len(pruned.layers), **details})


class Scene:
    """A cache of GPT-2 small's shape with some rows, and a row that comes and goes."""

    def __init__(self, pruned, survivors: int, beside: int):
        layers = len(pruned.layers)
        one = filled_cache(pruned, 1000, torch.full((layers, 1), survivors))
        self.snapshot = one.snapshot()
        self.cache = filled_cache(pruned, 1000, torch.full((layers, beside), 200))
        self.beside = beside
        # the first row that comes finds no chunk for it
        self.join_and_leave()

    def join_and_leave(self) -> tuple[float, float]:
        """Seconds of each; nothing else may move."""
        tables = [store.table for store in self.cache.stores]
        before = [table.offsets() for table in tables]
        start = time.perf_counter()
        self.cache.join(self.snapshot)
        joined = time.perf_counter()
        assert [table.offsets()[:-1] for table in tables] == before
        middle = time.perf_counter()
        self.cache.leave(self.beside)
        left = time.perf_counter()
        assert [table.offsets() for table in tables] == before
        return joined - start, left - middle


if __name__ == "__main__":
    main()
