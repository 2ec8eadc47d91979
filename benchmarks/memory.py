"""How many bytes does the cache take at 80 % pruned, and a long prompt while it is read?"""

import harness

LENGTHS = [16000, 32000]


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--peak", type=int, metavar="N", help="used by the script itself")
    parser.add_argument("--layers", type=int, help="layers of the model")
    parser.add_argument("--process", metavar="KIND", help="used by the script itself")
    args = parser.parse_args()
    if args.peak:
        print(prefill_peak(args.peak, args.layers))
        return
    if args.process:
        print(process_bytes(args.process))
        return
    smollm2 = real_text(args.sizes)
    storage, load = storages()
    dense, ours = (harness.child("--process", kind) for kind in ("dynamic", "ours"))
    # the question is growth with length; fewer layers save time
    layers = args.layers or {"quick": 1, "bench": 4, "full": 12}[args.sizes]
    peaks = {n: harness.child("--peak", str(n), "--layers", str(layers)) for n in LENGTHS}
    ratios = {
        "bytes_at_80": max(storage, ours / dense),
        "prefill_peak_16000_to_32000": peaks[32000] / peaks[16000],
        **{name: ratio for name, _, _, ratio in smollm2},
    }
    rows = [
        ["storages, uneven rows, load factor " + f"{load:.2f}", "dense", storage],
        ["process memory", "dense", ours / dense],
        ["peak of a prefill of 32,000", "of 16,000", ratios["prefill_peak_16000_to_32000"]],
        *([what, against, ratio] for _, what, against, ratio in smollm2),
    ]
    details = {
        "process_bytes": {"ours": ours, "dense": dense},
        "prefill_peak_bytes": peaks,
        "layers": layers,
    }
    harness.report(args, ratios, ["what", "against", "ratio"], rows, details)


def filled_cache(pruned):
    """GPT-2 small's shape, batch 32, context 1000, 200 survivors ± 10 % by row, ± 40 % by layer."""
    import torch

    from kvprune.evaluate.throughput.decoding import filled_cache as filled

    random = torch.Generator().manual_seed(0)
    share = 0.9 + 0.2 * torch.rand(12, 32, generator=random)
    share *= 0.6 + 0.8 * torch.rand(12, 1, generator=random)
    kept = (share / share.mean() * 200).round().long()
    return filled(pruned, 1000, kept)


def storages() -> tuple[float, float]:
    from models import attached, gpt2

    cache = filled_cache(attached(gpt2("float32")))
    return cache.nbytes / cache.dense_nbytes, cache.load_factor


def real_text(sizes: str) -> list[tuple[str, str, str, float]]:
    """Bytes of SmolLM2's cache, strength 80, bfloat16, after real text.

    (name, what, against what, ratio)
    """
    import torch

    import kvprune
    from models import real_rows

    rows, length = (2, 500) if sizes == "quick" else (16, 2000)
    pruned = kvprune.load("smollm2-135m-80", dtype=torch.bfloat16)
    ids = real_rows(pruned, rows, length)

    def read(ids: torch.Tensor, **options: object) -> kvprune.PrunedCache:
        cache = kvprune.PrunedCache(pruned, **options)
        with torch.inference_mode():
            pruned.model.base_model(ids, past_key_values=cache)
        return cache

    plain, int8 = read(ids), read(ids, kv="int8")
    # rows of all ages in one cache, each read by itself
    ages = torch.linspace(10, length, 4 * rows).long().tolist()
    mixed = kvprune.PrunedCache(pruned)
    for row, age in enumerate(ages):
        mixed.join(read(ids[row % rows, :age][None]).snapshot())
    share = float(plain.kept.sum()) / (plain.kept.numel() * length)
    about = f"SmolLM2, {rows} rows x {length} tokens, {1 - share:.0%} dropped at the end"
    return [
        ("smollm2_bytes_vs_kept", about, "its kept K and V", plain.nbytes / kept_bytes(plain)),
        ("smollm2_bytes_vs_dense", about, "dense", plain.nbytes / plain.dense_nbytes),
        ("smollm2_int8_vs_dense", f"{about}, int8", "dense", int8.nbytes / int8.dense_nbytes),
        ("ages_bytes_vs_kept", f"SmolLM2, {len(ages)} rows of 10 to {length} tokens",
         "its kept K and V", mixed.nbytes / kept_bytes(mixed)),
    ]  # fmt: skip


def kept_bytes(cache) -> float:
    tables = [store.table for store in cache.stores]
    return float(sum(table.kept.sum() * table.dense_nbytes for table in tables))


def process_bytes(kind: str) -> float:
    """Growth of this process when the cache is created."""
    import gc

    from kvprune.evaluate.throughput.decoding import dense_cache
    from models import attached, gpt2

    model = gpt2("float32")
    pruned = attached(model) if kind == "ours" else None
    before = harness.resident("VmRSS")
    cache = filled_cache(pruned) if pruned else dense_cache("dynamic", model, 32, 1000, 0)
    gc.collect()
    size = harness.resident("VmRSS") - before
    del cache
    return size


def prefill_peak(length: int, layers: int) -> float:
    """Peak bytes beyond the model of reading a prompt of `length` tokens, Llama shape."""
    import torch

    import kvprune
    from models import attached, llama

    model = llama(40000, layers)
    pruned = attached(model)

    def read(n: int) -> None:
        with torch.inference_mode():
            model(torch.randint(8192, (1, n)), past_key_values=kvprune.PrunedCache(pruned),
                  logits_to_keep=1)  # fmt: skip

    read(512)
    before = harness.resident("VmRSS")
    harness.forget_peak()
    read(length)
    return harness.resident("VmHWM") - before


if __name__ == "__main__":
    main()
