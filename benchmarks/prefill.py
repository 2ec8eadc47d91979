"""How long does a prompt take? Ours against dense SDPA, 80 % pruned, by length."""

import harness


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    ratios, rows = {}, []
    for length in (1000, 8192):
        repeats = 2 if args.quick else (7 if length == 1000 else 3)
        seconds, sparsity = prefill(length, repeats, layers=2 if args.quick else 12)
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
    models = {name: GPT2LMHeadModel(config).eval() for name in ("dense", "ours")}
    pruned = kvprune.attach(models["ours"], kvprune.PruningConfig())
    ids = torch.randint(50257, (1, length))

    def run(name: str):
        @torch.inference_mode()
        def call() -> None:
            models[name](ids, use_cache=True, logits_to_keep=1)

        return call

    tune(pruned, ids, 0.8)
    seconds = harness.interleave(repeats, {name: run(name) for name in models})
    return seconds, pruned.sparsity().total


def tune(pruned, ids, target: float) -> None:
    """Set β so that about `target` of the context is pruned, by bisection."""
    import torch

    low, high = 0.0, 8.0
    for _ in range(7):
        beta = (low + high) / 2
        with torch.no_grad():
            for interaction in pruned.interactions:
                interaction.beta.fill_(beta)
        pruned.trace(ids)
        if pruned.sparsity().total > target:
            low = beta
        else:
            high = beta


if __name__ == "__main__":
    main()
