"""How long does a prompt take? Ours against dense SDPA, and against its matrix products alone."""

import statistics

import harness
from kvprune.evaluate.throughput.bfloat16 import is_emulated
from kvprune.evaluate.throughput.rigged import aim_by_layer
from kvprune.integration.row_lora import twin


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    ratios, rows, details = {}, [], {}
    repeats = {"quick": (2, 2), "bench": (5, 3), "full": (7, 3)}[args.sizes]
    layers = 2 if args.sizes == "quick" else 12
    precisions = ["float32"] if is_emulated() else ["float32", "bfloat16"]
    for precision in precisions:
        for length, rounds in zip((1000, 8192), repeats, strict=True):
            seconds, sparsity = prefill(length, rounds, layers, precision)
            name = f"time_{length}" + ("" if precision == "float32" else f"_{precision}")
            ratios[name] = harness.ratio(seconds["ours"], seconds["dense"])
            what = f"{precision}, {length} tokens, {sparsity:.0%} pruned"
            rows.append([what, "dense", ratios[name]])
    shapes = [(2, 200)] if args.sizes == "quick" else [(16, 1000), (16, 2000)]
    for batch, length in shapes:
        seconds, sparsity = read(batch, length, precisions[-1], 1 if args.sizes == "quick" else 3)
        name = f"read_vs_products_{batch}x{length}"
        ratios[name] = harness.ratio(seconds["read"], seconds["products"])
        what = f"SmolLM2, {precisions[-1]}, {batch} x {length} tokens, {sparsity:.0%} dropped"
        rows.append([what, "its matrix products", ratios[name]])
        details[name] = {kind: statistics.median(times) for kind, times in seconds.items()}
    harness.report(args, ratios, ["prompt", "against", "time ratio"], rows, details)


def prefill(
    length: int, repeats: int, layers: int, precision: str
) -> tuple[dict[str, list[float]], float]:
    """Seconds to read a prompt into an empty cache; GPT-2 small's shape, batch 1."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import kvprune

    torch.manual_seed(0)
    config = GPT2Config(n_positions=8192, n_layer=layers)
    dense = GPT2LMHeadModel(config).to(getattr(torch, precision)).eval()
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


def read(
    batch: int, length: int, precision: str, repeats: int
) -> tuple[dict[str, list[float]], float]:
    """Seconds in which `generate` reads real text, and of the linear layers of the same passes.

    SmolLM2, strength 80, as `kvprune generate` loads it.
    """
    import torch
    from torch import nn

    from kvprune.adapters.load import load_with_tokenizer
    from kvprune.integration.few_rows import speed_up
    from kvprune.integration.fused import fuse
    from kvprune.utils.malloc import keep_memory
    from models import real_rows

    keep_memory()
    loaded = load_with_tokenizer("smollm2-135m-80", merge=True, dtype=precision)
    pruned = loaded.attached()
    pruned.tokenizer = loaded.tokenizer
    speed_up(pruned.model)
    fuse(pruned.model)
    ids = real_rows(pruned, batch, length)
    called: list[tuple[nn.Linear, tuple[int, ...]]] = []

    def note(module: nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
        called.append((module, inputs[0].shape))

    handles = [
        module.register_forward_pre_hook(note)
        for name, module in pruned.model.named_modules()
        if isinstance(module, nn.Linear) and "interaction" not in name
    ]

    def generate() -> None:
        pruned.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False,
            pad_token_id=0,
        )  # fmt: skip

    generate()
    for handle in handles:
        handle.remove()
    inputs = {shape: torch.randn(shape).to(pruned.model.dtype) for _, shape in called}

    @torch.inference_mode()
    def products() -> None:
        for module, shape in called:
            module(inputs[shape])

    seconds = harness.interleave(repeats, {"read": generate, "products": products}, warmup=0)
    return seconds, pruned.sparsity().total


if __name__ == "__main__":
    main()
