"""The cost model against counted operations and real storages."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache

import kvprune
import kvprune.integration.host
import zoo
from helpers import random_ids, uneven_gates
from kvprune import PruneError
from kvprune.cache.extents import ExtentTable
from kvprune.evaluate.cost.formulas import (
    BYTES,
    PARTS,
    cache_bytes,
    cost,
    decode_flops,
    prefill_flops,
)
from kvprune.evaluate.cost.shape import Shape, load_config, read_shape

CONTEXT = 24
COUNTED = ["gpt2", "llama", "mistral", "qwen2", "gpt_neox", "phi3", "opt", "gemma2", "qwen3"]
COUNTED += ["mixtral", "qwen3_moe", "gpt_oss", "gpt_bigcode"]
CACHED = [*COUNTED, "deepseek_v3", "gemma3", "llama4", "cohere2", "smollm3", "biogpt"]


def counted(model, run) -> dict[str, float]:
    """FLOPs that torch counts in `run`: total, in attention modules, in the logits."""
    with torch.inference_mode(), FlopCounterMode(display=False, depth=None) as counter:
        run()
    by_module = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    names = {id(module): name for name, module in model.named_modules()}
    kind = type(model).__name__

    def of(module) -> float:
        return by_module.get(f"{kind}.{names[id(module)]}", 0)

    attention = sum(of(site.module) for site in kvprune.integration.host.find_sites(model))
    return {
        "all": by_module["Global"],
        "attention": attention,
        "logits": of(model.get_output_embeddings()),
    }


@pytest.mark.parametrize("family", COUNTED)
def test_a_dense_token_costs_what_torch_counts(family):
    model = zoo.make(family, attn_implementation="eager")
    # grouped products of experts are not counted; one expert after the other is
    model.set_experts_implementation("eager")
    ids, cache = random_ids(1, CONTEXT + 1), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :-1], past_key_values=cache)
    count = counted(model, lambda: model(ids[:, -1:], past_key_values=cache))
    flops = decode_flops(read_shape(model.config), CONTEXT)
    assert list(flops) == list(PARTS)
    assert flops["logits"] == count["logits"]
    assert flops["qkvo"] + flops["attention"] == count["attention"]
    assert sum(flops.values()) == count["all"]
    assert flops["drop-tokens"] == flops["embedding"] == 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_votes_cost_what_torch_counts(family):
    """Open gates keep everything: a real step is the formula at sparsity 0."""
    model = zoo.make(family)
    shape = read_shape(model.config)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8, beta=1e6))
    ids, cache = random_ids(1, CONTEXT + 1), kvprune.PrunedCache(pruned, backend="reference")
    with torch.inference_mode():
        model(ids[:, :-1], past_key_values=cache)
    count = counted(model, lambda: model(ids[:, -1:], past_key_values=cache))
    flops = decode_flops(shape, CONTEXT, 0.0, rank=8)
    assert flops["drop-tokens"] == 3 * 2 * 8 * (64 + 64 + CONTEXT)
    # the one product that torch does not count is its fused attention on a CPU
    assert sum(flops.values()) - flops["attention"] == count["all"]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prompt_costs_what_torch_counts(family):
    model = zoo.make(family, attn_implementation="eager")
    ids = random_ids(1, CONTEXT)
    count = counted(model, lambda: model(ids, logits_to_keep=1))
    flops = prefill_flops(read_shape(model.config), CONTEXT)
    # torch also multiplies the masked half: all n² pairs instead of n (n + 1) / 2
    masked = flops["attention"] * (CONTEXT - 1) / (CONTEXT + 1)
    assert sum(flops.values()) + masked == pytest.approx(count["all"])


@pytest.mark.parametrize("window", [None, 5, 100])
def test_pairs_of_a_prompt_counted_one_by_one(window):
    shape, tokens, sparsity = read_shape(zoo.make("llama").config), 13, 0.25
    layer = shape.layers[0]
    layer = type(layer)(**{**vars(layer), "window": window})
    one = Shape(**{**vars(shape), "layers": (layer,)})
    flops = prefill_flops(one, tokens, sparsity, rank=8)
    seen = 0.0
    for k in range(tokens):
        for j in range(k + 1):
            if j == k or (window and k - j < window):
                seen += 1
            elif not window:
                seen += 1 - sparsity
    assert flops["attention"] == pytest.approx(seen * 2 * 4 * (16 + 16))
    votes = 0 if window else 2 * 8 * (2 * 64 * tokens + seen - tokens)
    assert flops["drop-tokens"] == pytest.approx(votes)


def test_flops_fall_with_sparsity_and_rise_with_the_interaction():
    shape = read_shape("gpt2")
    dense, open_, sparse = (
        sum(decode_flops(shape, 1000, s, r).values()) for s, r in ((0, None), (0, 64), (0.8, 64))
    )
    assert sparse < dense < open_
    assert open_ < 1.03 * dense  # the paper: minimal


@pytest.mark.parametrize("family", CACHED)
def test_bytes_of_a_real_dense_cache(family):
    """What kvprune counts as dense, including unpruned layers."""
    model = zoo.make(family)
    pruned = kvprune.attach(model, kvprune.DenseConfig())
    cache = kvprune.PrunedCache(pruned)
    with torch.inference_mode():
        for part in random_ids(2, CONTEXT).split(1, dim=1):
            model(part, past_key_values=cache)
    want = cache_bytes(read_shape(model.config), CONTEXT, batch=2)
    assert want.total == cache.dense_nbytes
    assert want.interaction_keys == want.bookkeeping == 0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_a_real_pruned_cache_are_within_the_slack(backend, dtype):
    model = zoo.make("llama").to(getattr(torch, dtype))
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned)
    shape = read_shape(model.config, dtype)
    cache = kvprune.PrunedCache(pruned, backend=backend)
    ids = random_ids(3, 300)
    with torch.inference_mode():
        model(ids[:, :200], past_key_values=cache)
        for step in range(200, 300):
            model(ids[:, step : step + 1], past_key_values=cache)
            if step % 20:
                continue
            for store, kept in zip(cache.stores, cache.kept.tolist(), strict=True):
                one = Shape(**{**vars(shape), "layers": shape.layers[:1]})
                # full contexts of those lengths
                held, most = (
                    sum(cache_bytes(one, n, 0.0, rank=8, slack=slack).total for n in kept)
                    for slack in ("none", "most")
                )
                # an extent is a multiple of 64 bytes
                assert held <= store.nbytes <= most + 3 * 63
            gaps = cache.nbytes - sum(store.nbytes for store in cache.stores)
            assert gaps <= max(cache.nbytes / 16, 2**14) + cache.nbytes / 16
    assert float(cache.kept.float().mean()) < 200  # something was dropped


def test_a_new_table_matches_the_cost_model():
    model = zoo.make("gpt2")
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8, beta=1e6))
    cache = kvprune.PrunedCache(pruned)
    with torch.inference_mode():
        model(random_ids(2, 200), past_key_values=cache)
    shape = read_shape(model.config)
    want = cache_bytes(shape, 200, 0.0, 2, rank=8, slack="new").total
    # an extent is a multiple of 64 bytes
    assert want <= sum(store.nbytes for store in cache.stores) <= want + 2 * 3 * 63
    assert want <= cache.nbytes <= want * 17 / 16


def test_storage_that_is_not_yet_returned():
    """As tokens leave: more than a new storage, at most what the cost model allows."""
    shape = read_shape(zoo.make("llama").config)
    one = Shape(**{**vars(shape), "layers": shape.layers[:1]})
    table, beyond = ExtentTable(2, 2, 16, rank=8), 0
    generator = torch.Generator().manual_seed(0)
    x, token = torch.zeros(2, 2, 200, 16), torch.arange(200).expand(2, 200)
    table.push(x, x, torch.zeros(2, 200, 8), token)
    for _ in range(60):
        table.remove(torch.rand(2, table.width, generator=generator) < 0.02)
        held, new, most = (
            sum(cache_bytes(one, n, rank=8, slack=slack).total for n in table.kept.tolist())
            for slack in ("none", "new", "most")
        )
        assert held <= table.nbytes <= most + 2 * 63
        beyond += table.nbytes > new
    assert beyond > 5


def test_bytes_are_linear_in_sparsity_and_batch():
    shape = read_shape("gpt2")
    at = [cache_bytes(shape, 1000, s, rank=64).total for s in (0, 0.5, 1)]
    assert at[0] - at[1] == at[1] - at[2]
    assert at[2] == 0
    assert cache_bytes(shape, 1000, 0.5, 7, 64).total == 7 * at[1]
    # the paper's shape: 64 float32 in addition to 1536 numbers of keys and values
    dense = cache_bytes(shape, 1000)
    assert dense.keys == dense.values == 12 * 1000 * 768 * BYTES["float32"]
    assert at[0] / dense.total == pytest.approx(1 + 64 / 1536 + 4 / (1536 * 4))


def test_gpt2_sizes_have_the_papers_parameters():
    millions = [round(read_shape(name).parameters / 1e6) for name in
                ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")]  # fmt: skip
    assert millions == [124, 355, 774, 1558]


def test_shape_of_a_folder_and_of_tiny(tmp_path):
    model = zoo.make("qwen2")
    model.config.save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layers[0].key_heads == 2
    assert read_shape("tiny").dtype == "float32"
    assert read_shape(tmp_path, "bfloat16").dtype == "bfloat16"
    assert load_config("gpt2-xl").n_layer == 48


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: read_shape(Path(__file__).parent), "cannot load the configuration"),
        (lambda: read_shape(zoo.make("bamba").config), "not modelled"),
        (lambda: read_shape(zoo.make("t5").config), "no causal language model"),
        (lambda: decode_flops(read_shape("tiny"), 10, 1.5), "share of the context"),
        (lambda: cache_bytes(read_shape("tiny", "int4"), 10), "'int4' is unknown"),
        (lambda: cache_bytes(read_shape("tiny"), 10, rank=8, slack="some"), "slack='some'"),
    ],
)
def test_errors(call, message):
    with pytest.raises(PruneError, match=message):
        call()


def test_rows_of_a_sweep():
    rows = list(cost(read_shape("tiny"), (0.0, 0.8), (100, 500), (1, 4), rank=32))
    assert len(rows) == 2 * 2 * 3
    dense, _, sparse = rows[-3:]
    assert (dense["method"], sparse["sparsity"], sparse["batch"]) == ("dense", 0.8, 4)
    assert sparse["cache_ratio"] == sparse["cache_bytes"] / dense["cache_bytes"]
    assert sparse["cache_bytes_most"] > sparse["cache_bytes"] == sum(sparse["bytes"].values())
    assert sparse["flops_token"] == sum(sparse["flops"].values())
