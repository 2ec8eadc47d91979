"""How should idle OpenMP threads wait: spinning in a loop, as they do by default, or asleep?

One process per policy, each with a model of SmolLM2's width; they work in turn, first on a quiet
machine, then beside one busy process of the lowest priority. That process has a session of its own,
as from another terminal: between sessions Linux shares the cores evenly, whatever the priority.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import harness
from kvprune.utils.openmp import CHOICES, SPINS

SPINNING, OURS = "spin 300,000", "spin 1,000"
POLICIES = {
    SPINNING: {"GOMP_SPINCOUNT": "300000"},  # libgomp's own default
    "passive": {"OMP_WAIT_POLICY": "passive"},
    OURS: {"GOMP_SPINCOUNT": SPINS},  # kvprune's
}
BATCHES, CONTEXT, STEPS = (1, 8), 500, 4
WORK = [*(f"decode, batch {batch}" for batch in BATCHES), "read 512 tokens", "training step"]


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--child", type=int, metavar="LAYERS", help="used by the script itself")
    args = parser.parse_args()
    if args.child:
        work(args.child)
        return
    layers, rounds = {"quick": (2, 2), "bench": (6, 4), "full": (30, 5)}[args.sizes]
    children = {name: start(layers, env) for name, env in POLICIES.items()}
    try:
        measure(children, 1)  # compiles and loads
        seconds = {"quiet": measure(children, rounds)}
        with busy_process():
            seconds["one core busy"] = measure(children, rounds)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    ratios, rows = {}, []
    for machine, by_work in seconds.items():
        for what, times in by_work.items():
            values = {name: harness.ratio(times[name], times[SPINNING]) for name in POLICIES}
            rows.append([f"{what}, {machine}", *(values[name] for name in list(POLICIES)[1:])])
            ratios[f"{what}, {machine}"] = values[OURS]
    columns = [f"time / {SPINNING}", *list(POLICIES)[1:]]
    harness.report(args, ratios, columns, rows, {"seconds": seconds})


def measure(
    children: dict[str, subprocess.Popen[str]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Seconds by work and policy; a round does each piece of work once under every policy."""
    seconds: dict[str, dict[str, list[float]]] = {w: {p: [] for p in POLICIES} for w in WORK}
    for _ in range(rounds):
        for what in WORK:
            for name, child in children.items():
                assert child.stdin is not None
                assert child.stdout is not None
                print(what, file=child.stdin, flush=True)
                seconds[what][name].append(float(child.stdout.readline()))
    return seconds


def start(layers: int, policy: dict[str, str]) -> subprocess.Popen[str]:
    env = {name: value for name, value in os.environ.items() if name not in CHOICES}
    return subprocess.Popen(
        [sys.executable, sys.argv[0], "--child", str(layers)],
        env=env | policy, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


@contextmanager
def busy_process() -> Iterator[None]:
    loop = "import os\nos.nice(19)\nwhile True: pass"
    process = subprocess.Popen([sys.executable, "-c", loop], start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def work(layers: int) -> None:
    """Do what stdin says, line by line, and print how many seconds it took."""
    calls = all_work(layers)
    for line in sys.stdin:
        begin = time.perf_counter()
        calls[line.strip()]()
        print(time.perf_counter() - begin, flush=True)


def all_work(layers: int) -> dict[str, Callable[[], None]]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvprune
    from kvprune.evaluate.throughput.decoding import filled_cache, stepper
    from models import survivors

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=64, alpha=4.0))
    calls: dict[str, Callable[[], None]] = {}
    for batch in BATCHES:
        cache = filled_cache(pruned, CONTEXT, survivors(layers, batch, CONTEXT, 0.5))
        calls[f"decode, batch {batch}"] = stepper(model, cache, batch, STEPS)
    ids = torch.randint(49152, (1, 512))

    @torch.inference_mode()
    def read() -> None:
        model(ids, use_cache=True, logits_to_keep=1)

    def train() -> None:
        model.train()
        loss = model(ids[:, :256], labels=ids[:, :256], use_cache=False).loss
        (loss + 0.3 * pruned.sparsity_loss()).backward()
        model.zero_grad()
        model.eval()

    return {**calls, "read 512 tokens": read, "training step": train}


if __name__ == "__main__":
    main()
