"""How fast is one more token? Ours at 80 % pruned against dense caches, by batch and context."""

import statistics

import harness
from kvprune.evaluate.throughput.bfloat16 import is_emulated
from kvprune.evaluate.throughput.decoding import dense_cache, filled_cache, stepper
from kvprune.integration.row_lora import twin
from models import attached, gpt2, llama, survivors

CONTEXT, SPARSITY, STEPS = 1000, 0.8, 4
# more than 48, and four caches do not fit into 24 GB
BATCHES = {
    "quick": {"float32": [32], "bfloat16": [32]},
    "bench": {"float32": [1, 32], "bfloat16": [32]},
    "full": {"float32": [1, 8, 32, 48], "bfloat16": [1, 8, 32, 48]},
}
# of the Llama shape; a dense cache of 16,000 tokens takes longer than all the others together
CONTEXTS = {
    "quick": [1000, 32000],
    "bench": [1000, 4000, 32000],
    "full": [250, 1000, 4000, 16000, 32000],
}


def main() -> None:
    args = harness.arguments(__doc__).parse_args()
    ratios: dict[str, float] = {}
    rows: list[list[object]] = []
    details: dict[str, object] = {}
    quick = args.sizes == "quick"
    repeats = {"quick": 3, "bench": 4, "full": 5}[args.sizes]
    for precision, batches in BATCHES[args.sizes].items():
        speeds: dict[str, list[float]] = {}
        for batch in batches:
            seconds = gpt2_steps(precision, batch, CONTEXT, repeats, quick)
            for other in ("dynamic", "static", "dense"):
                ratio = harness.ratio(seconds[other], seconds["ours"])
                rows.append([f"{precision}, batch {batch}, context {CONTEXT}", other, ratio])
                if batch == 32 and other != "dense":
                    ratios[f"{precision}_b32_vs_{other}"] = ratio
            tokens = {name: batch * STEPS / statistics.median(s) for name, s in seconds.items()}
            details[f"tokens_per_second_{precision}_b{batch}"] = tokens
            for name, speed in tokens.items():
                speeds.setdefault(name, []).append(speed)
        for other in ("dynamic", "static", "dense"):
            ratio = max(speeds["ours"]) / max(speeds[other])
            rows.append([f"{precision}, each at its best batch", other, ratio])
    details["bfloat16_products"] = "float32 on all sides" if is_emulated() else "native"
    short = []
    for batch in [1] if quick else [1, 8, 32]:
        # always all twelve layers: this measures what a layer costs in addition to its products
        seconds = gpt2_steps("float32", batch, 64, 9, False, only=("dynamic", "ours"))
        short.append(harness.ratio(seconds["dynamic"], seconds["ours"]))
        rows.append([f"float32, batch {batch}, context 64", "dynamic", short[-1]])
    ratios["float32_ctx64_vs_dynamic"] = min(short)

    share, numbers = bandwidth(repeats, quick)
    ratios["attention_bandwidth_share"] = share
    rows.append(["attention's bytes/s, float32, batch 32", "read bandwidth", share])
    details["bandwidth"] = numbers

    contexts = CONTEXTS[args.sizes]
    seconds = llama_steps(contexts, repeats, 2 if quick else 12)
    for context in contexts:
        ratio = harness.ratio(seconds[f"ours {context}"], seconds["ours 1000"])
        rows.append([f"Llama shape, 256 survivors, time at {context}", "time at 1000", ratio])
        if f"dynamic {context}" in seconds:
            ratio = harness.ratio(seconds[f"dynamic {context}"], seconds["dynamic 1000"])
            rows.append([f"Llama shape, dense, time at {context}", "time at 1000", ratio])
    flat = harness.ratio(seconds["ours 32000"], seconds["ours 1000"])
    ratios["flat_1000_to_32000"] = flat

    seconds = uneven_and_ideal(repeats, quick)
    ratios["uneven_vs_ideal"] = harness.ratio(seconds["uneven"], seconds["ideal"])
    rows.append(["uneven rows, time", "all rows alike", ratios["uneven_vs_ideal"]])

    for name, uneven in (("even", False), ("uneven", True)):
        seconds = stores(repeats, quick, uneven)
        ratio = harness.ratio(seconds["slots"], seconds["extents"])
        ratios["extents_vs_slots" + ("_uneven" if uneven else "")] = ratio
        rows.append([f"float32, batch 32, context {CONTEXT}, {name} rows", "store='slots'", ratio])
    seconds = stored_numbers(repeats, quick)
    ratios["int8_vs_bfloat16"] = harness.ratio(seconds["bfloat16"], seconds["int8"])
    rows.append(["Llama shape, kv='int8', batch 16, context 8000", "bfloat16",
                 ratios["int8_vs_bfloat16"]])  # fmt: skip
    for batch in (1, 8):
        seconds = compiled(batch, repeats, quick)
        ratios[f"compiled_vs_eager_b{batch}"] = harness.ratio(seconds["eager"], seconds["both"])
        for name, what in {
            "compiled": "compiled",
            "few rows": "our linear layers",
            "both": "both",
        }.items():
            ratio = harness.ratio(seconds["eager"], seconds[name])
            rows.append([f"SmolLM2's shape, {what}, bfloat16, batch {batch}", "eager", ratio])
    harness.report(args, ratios, ["ours", "against", "ratio"], rows, details)


def gpt2_steps(
    precision: str, batch: int, context: int, repeats: int, quick: bool, only=None
) -> dict[str, list[float]]:
    import kvprune

    plain = gpt2(precision, quick)
    # the same weights in the same memory; making them takes longer than a step
    pruned_model = twin(plain)
    room = STEPS * (repeats + 2)
    layers = plain.config.num_hidden_layers
    kept = survivors(layers, batch, context, SPARSITY)
    ours = filled_cache(attached(pruned_model), context, kept)
    calls = {"ours": stepper(pruned_model, ours, batch, STEPS)}
    for kind in ("dynamic", "static"):
        if only is None or kind in only:
            cache = dense_cache(kind, plain, batch, context, room)
            calls[kind] = stepper(plain, cache, batch, STEPS)
    if only is None:
        dense_model = twin(plain)
        store = kvprune.attach(dense_model, kvprune.DenseConfig())
        full = survivors(layers, batch, context, 0.0, uneven=False)
        calls["dense"] = stepper(dense_model, filled_cache(store, context, full), batch, STEPS)
    return harness.interleave(repeats, calls)


def bandwidth(repeats: int, quick: bool) -> tuple[float, dict[str, float]]:
    """Bytes per second that attention reads over all layers, against a plain sum of 1 GB."""
    import torch

    from kvprune.ops.decode import NewToken, Votes, decode
    from kvprune.ops.form import AttentionForm

    batch, model = 32, gpt2("float32", quick)
    kept = survivors(model.config.n_layer, batch, CONTEXT, SPARSITY)
    cache = filled_cache(attached(model), CONTEXT, kept)
    query, key, value = (torch.randn(batch, 12, 1, 64) for _ in range(3))
    now = torch.full((batch,), CONTEXT)
    new, form = NewToken(query, key, value, now), AttentionForm(0.125)
    block = torch.ones(256 * 2**20)

    # new votes each time: the same ones again would drop nothing, and every row would grow
    drawn = iter([
        (torch.randn(batch, 64) / 8, torch.randn(batch, 64))
        for _ in range((repeats + 2) * len(cache.stores))
    ])  # fmt: skip

    def attend() -> None:
        for store in cache.stores:
            query_int, key_int = next(drawn)
            decode(store.table, new, form, votes=Votes(query_int, key_int, 2.58))

    seconds = harness.interleave(repeats, {"attend": attend, "read": lambda: block.sum()})
    slot = (2 * 768 + 64) * 4
    moved = float(cache.kept.sum()) * slot
    best = {name: min(times) for name, times in seconds.items()}
    attention, read = moved / best["attend"], block.numel() * 4 / best["read"]
    return attention / read, {"attention_gb_s": attention / 1e9, "read_gb_s": read / 1e9}


def llama_steps(contexts: list[int], repeats: int, layers: int) -> dict[str, list[float]]:
    """Batch 8, 256 survivors whatever the context, against dense."""
    batch, calls = 8, {}
    plain = llama(40000, layers)
    ours = twin(plain)
    pruned = attached(ours)
    for context in contexts:
        kept = survivors(layers, batch, 256 / 0.2, 0.8).clamp(max=context)
        calls[f"ours {context}"] = stepper(ours, filled_cache(pruned, context, kept), batch, STEPS)
        if context in (1000, 4000, 16000):
            cache = dense_cache("dynamic", plain, batch, context, 0)
            calls[f"dynamic {context}"] = stepper(plain, cache, batch, STEPS)
    return harness.interleave(repeats, calls)


def uneven_and_ideal(repeats: int, quick: bool) -> dict[str, list[float]]:
    """The paper's ideal case: every row holds as many tokens as every other."""
    calls, dense = {}, gpt2("float32", quick)
    for name in ("uneven", "ideal"):
        model = twin(dense)
        kept = survivors(model.config.n_layer, 32, CONTEXT, SPARSITY, uneven=name == "uneven")
        calls[name] = stepper(model, filled_cache(attached(model), CONTEXT, kept), 32, STEPS)
    return harness.interleave(repeats, calls)


def stores(repeats: int, quick: bool, uneven: bool) -> dict[str, list[float]]:
    """The same model on both tables."""
    calls, dense = {}, gpt2("float32", quick)
    for store in ("extents", "slots"):
        model = twin(dense)
        kept = survivors(model.config.n_layer, 32, CONTEXT, SPARSITY, uneven)
        cache = filled_cache(attached(model), CONTEXT, kept, store=store)
        calls[store] = stepper(model, cache, 32, STEPS)
    return harness.interleave(2 * repeats, calls, warmup=4)


def stored_numbers(repeats: int, quick: bool) -> dict[str, list[float]]:
    """80 % of 8,000 tokens pruned, in bfloat16 and in int8, with the commands' linear layers."""
    from kvprune.integration.few_rows import speed_up

    batch, calls = 16, {}
    plain = llama(9000, 2 if quick else 12, "bfloat16")
    for name, options in {"bfloat16": {}, "int8": {"kv": "int8"}}.items():
        model = twin(plain)
        kept = survivors(model.config.num_hidden_layers, batch, 8000, SPARSITY)
        cache = filled_cache(attached(model), 8000, kept, **options)
        speed_up(model)
        calls[name] = stepper(model, cache, batch, STEPS)
    return harness.interleave(2 * repeats, calls, warmup=4)


def compiled(batch: int, repeats: int, quick: bool) -> dict[str, list[float]]:
    """SmolLM2's shape after 1,000 tokens: as it is, compiled, with our linear layers, and both."""
    import torch

    from kvprune.integration.few_rows import speed_up

    plain, calls = llama(2048, 2 if quick else 30, "bfloat16", vocabulary=49152), {}
    for name in ("eager", "compiled", "few rows", "both"):
        model = twin(plain)
        kept = survivors(model.config.num_hidden_layers, batch, CONTEXT, SPARSITY)
        cache = filled_cache(attached(model), CONTEXT, kept)
        if name in ("few rows", "both"):
            speed_up(model)
        if name in ("compiled", "both"):
            model = torch.compile(model, fullgraph=True, dynamic=True)
        calls[name] = stepper(model, cache, batch, STEPS)
    return harness.interleave(2 * repeats, calls, warmup=2)


if __name__ == "__main__":
    main()
