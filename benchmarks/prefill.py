"""How long does a prompt take? Ours against dense SDPA, 80 % pruned, by length."""

import harness
from kvprune.evaluate.throughput.decoding import twin
from kvprune.evaluate.throughput.rigged import aim_by_layer


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    ratios, rows = {}, []
    repeats = {"quick": (2, 2), "bench": (5, 3), "full": (7, 3)}[args.sizes]
    for length, rounds in zip((1000, 8192), repeats, strict=True):
        seconds, sparsity = prefill(length, rounds, layers=2 if args.sizes == "quick" else 12)
        ratios[f"time_{length}"] = harness.ratio(seconds["ours"], seconds["dense"])
        rows.append([f"{length} tokens, {sparsity:.0%} pruned", ratios[f"time_{length}"]])
    harness.report(args, ratios, ["prompt", "time, ours / dense"], rows)


def prefill(length: int, repeats: int, layers: int) -> tuple[dict[str, list[float]], float]:
    """Seconds to read a prompt into an empty cache; GPT-2 small's shape, float32, batch 1."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import kvprune

    torch.manual_seed(0)
    config = GPT2Config(n_positions=8192, n_layer=layers)
    dense = GPT2LMHeadModel(config).eval()
    models = {"dense": dense, "ours": twin(dense)}
    pruned = kvprune.attach(models["ours"], kvprune.PruningConfig())
    ids = torch.randint(50257, (1, length))

    def run(name: str):
        @torch.inference_mode()
        def call() -> None:
            models[name](ids, use_cache=True, logits_to_keep=1)

        return call

    aim_by_layer(pruned, ids, 0.8)
    # before the long prompt, the short one and aim_by_layer have compiled and loaded everything
    warmup = 1 if length < 8192 else 0
    seconds = harness.interleave(repeats, {name: run(name) for name in models}, warmup)
    return seconds, pruned.sparsity().total


if __name__ == "__main__":
    main()
