"""How long does a prompt take? Ours against dense SDPA, 80 % pruned, by length."""

import harness
from kvprune.evaluate.throughput.decoding import twin


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

    tune(pruned, ids, 0.8)
    # compiled and loaded already where the prompt is long: by the short one, and by tuning
    warmup = 1 if length < 8192 else 0
    seconds = harness.interleave(repeats, {name: run(name) for name in models}, warmup)
    return seconds, pruned.sparsity().total


def tune(pruned, ids, target: float) -> None:
    """Set β so that about `target` of the context is pruned, by bisection in each layer.

    From the inputs of one pass, although those of later layers change a little with the β of
    earlier ones: at 8,192 tokens a pass takes half a minute. What came of it is printed.
    """
    import torch

    from kvprune.integration import host
    from kvprune.ops.keep.drop import drop_steps, kept_pairs
    from kvprune.ops.timeline import make_timeline

    timeline = make_timeline(None, tuple(ids.shape), ids.device)
    inputs = {}

    def look(layer):
        def hook(module, args, kwargs) -> None:
            inputs[layer] = layer.interaction(host.hidden_states(args, kwargs))[:2]

        return hook

    hooks = [
        site.module.register_forward_pre_hook(look(layer), with_kwargs=True, prepend=True)
        for site, layer in zip(pruned.sites, pruned.layers, strict=True)
    ]
    with torch.no_grad():
        pruned.trace(ids)
        for hook in hooks:
            hook.remove()
        for layer, (q_int, k_int) in inputs.items():
            low, high = 0.0, 8.0
            for _ in range(7):
                beta = torch.tensor((low + high) / 2)
                kept = kept_pairs(drop_steps(q_int, k_int, beta, timeline, 0.0), timeline)
                pruned_share = 1 - float(kept.sum() / timeline.pairs().sum())
                low, high = (float(beta), high) if pruned_share > target else (low, float(beta))
            layer.interaction.beta.fill_((low + high) / 2)


if __name__ == "__main__":
    main()
