"""How long do running answers wait while snapshots are written to a folder, and read from it?

SmolLM2 at strength 80 in bfloat16 writes four answers; meanwhile short requests with prompts of
1,000 tokens come and go, each of which leaves a snapshot in memory, and in the folder if there is
one: none, in the clear, encrypted. Then an engine that finds them in the folder, beside one that
reads the prompts again. The gap between two tokens of an answer is what a client sees.
"""

import itertools
import tempfile
import threading
import time

import harness
from kvprune.adapters.load import load_with_tokenizer
from kvprune.integration.few_rows import speed_up
from kvprune.integration.fused import fuse
from kvprune.serve.engine import Engine
from kvprune.serve.request import Request, Sampling
from kvprune.serve.snapshot_folder import SnapshotFolder
from models import real_rows

GREEDY = Sampling(temperature=0)
STREAMS, PROMPT = 4, 1000
SECRET = "0123456789abcdef" * 2
KINDS = {"none": None, "plain": None, "encrypted": SECRET}


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    rounds, comers = {"quick": (1, 3), "bench": (3, 4), "full": (5, 8)}[args.sizes]
    loaded = load_with_tokenizer("smollm2-135m-80", dtype="bfloat16", merge=True)
    speed_up(loaded.host)
    fuse(loaded.host)
    texts = real_rows(loaded.attached(), STREAMS + comers, PROMPT).tolist()
    gaps = {name: [] for name in KINDS}
    firsts = {name: [] for name in KINDS}
    sizes = []
    run(loaded.attached(), None, texts)  # warm up
    for _ in range(rounds):
        for name, secret in KINDS.items():
            with tempfile.TemporaryDirectory() as path:
                folder = None if name == "none" else SnapshotFolder(path, 10**10, secret)
                gaps[name] += run(loaded.attached(), folder, texts)
                firsts[name] += again(loaded.attached(), folder, texts[STREAMS:])
                sizes += [] if folder is None else [folder_bytes(folder)]
    rows, ratios = [], {}
    for name in KINDS:
        median, late, worst = (quantile(gaps[name], share) for share in (0.5, 0.95, 1.0))
        first = quantile(firsts[name], 0.5)
        rows.append([name, *(1e3 * x for x in (median, late, worst, first))])
        if name != "none":
            for what, share in (("median", 0.5), ("p95", 0.95), ("worst", 1.0)):
                ratio = quantile(gaps[name], share) / quantile(gaps["none"], share)
                ratios[f"{what}_gap_{name}_vs_none"] = ratio
            ratios[f"first_token_none_vs_{name}"] = quantile(firsts["none"], 0.5) / first
    columns = ["folder", "gap median ms", "p95 ms", "worst ms", "first token again ms"]
    harness.report(args, ratios, columns, rows, {"mb_in_the_folder": max(sizes) / 1e6})


class Sink:
    def __init__(self):
        self.times, self.done = [], threading.Event()

    def __call__(self, events) -> None:
        self.times += [time.perf_counter()] * any(event.tokens for event in events)
        if any(event.finish for event in events):
            self.done.set()


def run(pruned, folder, texts) -> list[float]:
    """Gaps of the running answers while others come and go."""
    engine = Engine(pruned, budget="1GB", prefix_budget="1GB", snapshots=folder, chunk=256)
    engine.start()
    streams = [Sink() for _ in range(STREAMS)]
    for number, sink in enumerate(streams):
        engine.submit(Request(f"s{number}", tuple(texts[number][:50]), 400, GREEDY), sink)
    for number, text in enumerate(texts[STREAMS:]):
        sink = Sink()
        prompt = (*text, text[0])
        engine.submit(Request(f"c{number}", prompt, 2, GREEDY, boundaries=(len(text),)), sink)
        assert sink.done.wait(120)
    for number in range(STREAMS):
        engine.cancel(f"s{number}")
    engine.stop()
    times = [sink.times for sink in streams]
    return [b - a for own in times for a, b in itertools.pairwise(own)]


def again(pruned, folder, texts) -> list[float]:
    """Seconds to the first token of prompts that go on from what was read before."""
    engine = Engine(pruned, budget="1GB", prefix_budget="1GB", snapshots=folder)
    engine.start()
    found = []
    for number, text in enumerate(texts):
        sink, start = Sink(), time.perf_counter()
        engine.submit(Request(f"a{number}", (*text, 1, 2, 3), 1, GREEDY), sink)
        assert sink.done.wait(120)
        found.append(sink.times[0] - start)
    engine.stop()
    return found


def folder_bytes(folder: SnapshotFolder) -> int:
    files = folder._fs.find(folder._root, detail=True).values()
    return sum(file["size"] for file in files)


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


if __name__ == "__main__":
    main()
