"""What do several adapters over one base cost: rows of all in one pass, or one adapter at a time?

SmolLM2 with its two adapters and without, in bfloat16. The same number of rows is decoded, and the
same prompts are read, by
  mixed   one pass with the rows of all three, LoRA beside the shared weights
  turns   a pass for each adapter, over the same weights
  beside  one pass of strength 80 alone, LoRA beside the weights
  folded  one pass of strength 80 alone, LoRA folded into weights of its own
  three   a folded model for each adapter, as three servers would have
"""

import torch

import harness
from kvprune import PrunedCache
from kvprune.adapters.load import load_with_tokenizer
from kvprune.adapters.strengths import load_strengths
from kvprune.integration.few_rows import speed_up
from kvprune.integration.flat import Part, flat_forward
from kvprune.integration.fused import fuse
from models import real_rows

NAMES = ("smollm2-135m-70", "smollm2-135m-80", "smollm2-135m-dense")
BUSY = NAMES[1]
ROWS = {"quick": [3], "bench": [3, 12], "full": [3, 12, 24, 48]}
CONTEXT, STEPS, PROMPT = 200, 4, 256
MOST_READ = 3  # prompts of a scene: more are as fast per token


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--memory", help="print the bytes of a process that has loaded these")
    args = parser.parse_args()
    if args.memory:
        print(loaded_bytes(args.memory.split(",")))
        return
    torch.set_grad_enabled(False)
    repeats = {"quick": 3, "bench": 7, "full": 15}[args.sizes]
    together = load_strengths(NAMES, "bfloat16", prepare=fast)
    folded = {name: folded_model(name) for name in NAMES}
    ratios, rows = {}, []
    for count in ROWS[args.sizes]:
        for what in ("decode", "read"):
            if what == "read" and count > MOST_READ:
                continue
            scenes = all_scenes(together, folded, count, reads=what == "read")
            rounds = repeats if what == "decode" else repeats // 2
            times = harness.interleave(rounds, {name: s.run for name, s in scenes.items()})
            for name in scenes:
                if name != "mixed":
                    ratio = harness.ratio(times[name], times["mixed"])
                    ratios[f"{what}_{count}_rows_{name}_vs_mixed"] = ratio
                tokens = count * (PROMPT if what == "read" else STEPS)
                median = sorted(times[name])[rounds // 2]
                rows.append([what, count, name, tokens / median])
    bytes_of = {name: harness.child("--memory", name) for name in (*NAMES, ",".join(NAMES))}
    one = bytes_of.pop(",".join(NAMES))
    ratios["memory_three_processes_vs_one"] = sum(bytes_of.values()) / one
    details = {"one_process_mb": one / 1e6, **{f"{n}_mb": b / 1e6 for n, b in bytes_of.items()}}
    harness.report(args, ratios, ["what", "rows", "how", "tokens/s"], rows, details)


def fast(model) -> None:
    speed_up(model)
    fuse(model)


def folded_model(name):
    loaded = load_with_tokenizer(name, dtype="bfloat16", merge=True)
    fast(loaded.host)
    return loaded.attached()


def loaded_bytes(names: list[str]) -> float:
    """Of this process, ready to serve."""
    if len(names) > 1:
        load_strengths(names, "bfloat16", prepare=fast)
    else:
        folded_model(names[0])
    return harness.resident("VmRSS")


def all_scenes(together, folded, count: int, reads: bool) -> dict:
    """Every way to go on with so many rows, or to read so many prompts."""
    host, third = together[NAMES[0]], count // len(NAMES)
    each = [(together[name], third) for name in NAMES]
    apart = [(folded[name], third) for name in NAMES]
    passes = {
        "mixed": [(host, each)],
        "turns": [(host, [part]) for part in each],
        "beside": [(host, [(together[BUSY], count)])],
        "folded": [(folded[BUSY], [(folded[BUSY], count)])],
        "three": [(part[0], [part]) for part in apart],
    }
    return {name: Scene(own, reads) for name, own in passes.items()}


class Scene:
    """Passes, each with parts: so many rows of a model, in the middle of a text."""

    def __init__(self, passes, reads: bool):
        self.reads = reads
        self.passes = [
            (host, [[pruned, *self.begin(pruned, rows)] for pruned, rows in parts])
            for host, parts in passes
        ]

    def begin(self, pruned, rows: int):
        """A cache that has read the context, and the tokens that follow."""
        length = PROMPT if self.reads else CONTEXT
        ids = real_rows(pruned, rows, length + 1)
        if self.reads:
            return None, ids[:, :length]
        cache = PrunedCache(pruned)
        part = Part(cache, ids[:, :length], pruned.working, pruned)
        flat_forward(pruned, [part], torch.tensor([0]))
        return cache, ids[:, length:]

    def run(self) -> None:
        for _ in range(1 if self.reads else STEPS):
            for host, parts in self.passes:
                flat = [
                    Part(PrunedCache(own) if self.reads else cache, ids, own.working, own)
                    for own, cache, ids in parts
                ]
                count = sum(part.ids.numel() for part in flat)
                last = flat[0].ids.shape[1]
                flat_forward(host, flat, torch.arange(last - 1, count, last))


if __name__ == "__main__":
    main()
