"""What does keeping freed memory save on a CPU (`kvprune.utils.malloc`)?

Processes in turn, with and without; each trains a model of SmolLM2's width with a pruning gate and
a teacher on rows of 1,024 tokens, and reads as many, and prints the median of its steps.
"""

import os
import statistics

import harness

MODES = ("returned", "kept")


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--child", choices=MODES, help="used by the script itself")
    args = parser.parse_args()
    layers, steps, rounds = {"quick": (2, 3, 1), "bench": (4, 3, 2), "full": (8, 4, 3)}[args.sizes]
    if args.child:
        print(*steps_of(args.child, layers, steps))
        return
    seconds: dict[str, dict[str, list[float]]] = {
        what: {mode: [] for mode in MODES} for what in ("training step", "reading")
    }
    for _ in range(rounds):
        for mode in MODES:
            for what, value in zip(seconds, child(mode, args.sizes), strict=True):
                seconds[what][mode].append(value)
    ratios = {
        what: harness.ratio(times["kept"], times["returned"]) for what, times in seconds.items()
    }
    rows = [[what, value, "memory given back"] for what, value in ratios.items()]
    harness.report(args, ratios, ["what", "ratio", "of"], rows, {"seconds": seconds})


def child(mode: str, sizes: str) -> list[float]:
    # keep_memory() leaves the user's own settings unchanged
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    output = harness.printed("--child", mode, "--sizes", sizes, env=env)
    return [float(number) for number in output.split()]


def steps_of(mode: str, layers: int, steps: int) -> tuple[float, float]:
    """Seconds of a training step and of reading a row: medians, after a warm-up."""
    from kvprune.utils.malloc import keep_memory

    if mode == "kept" and not keep_memory():
        raise SystemExit("this system has no glibc: nothing to compare")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvprune
    from kvprune.train.distill import kl_to_teacher

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    teacher, model = LlamaForCausalLM(config).eval(), LlamaForCausalLM(config)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=32, alpha=4.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(49152, (1, 1024))

    def train() -> None:
        model.train()
        with torch.no_grad():
            want = teacher(ids, use_cache=False).logits
        out = model(ids, use_cache=False).logits
        loss = kl_to_teacher(out, want, ids) / ids.numel() + 0.3 * pruned.sparsity_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.inference_mode()
    def read() -> None:
        model.eval()
        model(ids, use_cache=False).logits.log_softmax(-1)

    seconds = harness.interleave(steps, {"train": train, "read": read})
    return statistics.median(seconds["train"]), statistics.median(seconds["read"])


if __name__ == "__main__":
    main()
