"""The roofline: its parts are those of the real cache and model, and the page shows its tables."""

import math
import sys
from pathlib import Path

import pytest
import torch

import kvprune
from kvprune.adapters import lora
from kvprune.cache.layout import Layout
from kvprune.evaluate.cost.formulas import decode_flops
from kvprune.evaluate.cost.shape import read_shape
from kvprune.evaluate.roofline import decode, tokens
from kvprune.evaluate.roofline.decode import Case
from kvprune.evaluate.roofline.memory import Run, fine_tuning, lora_weights, saved_by_layer
from kvprune.evaluate.roofline.models import LLAMA_1B, MODELS, QWEN3, Decoder
from kvprune.evaluate.roofline.tokens import Text
from kvprune.evaluate.roofline.work import A100, H100, Gpu, Work, seconds
from kvprune.train.parameters import set_trainable

ROOT = Path(__file__).parents[2]
KNOWN = {"SmolLM2-135M": 134_515_008, "Qwen3-0.6B": 596_049_920, "Llama-3.2-1B": 1_235_814_400,
         "Llama-3.1-8B": 8_030_261_248}  # fmt: skip


def test_the_page_shows_what_the_script_prints():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import roofline
    finally:
        sys.path.pop(0)
    page = roofline.PAGE.read_text()
    assert roofline.filled(page, roofline.tables()) == page, "run scripts/roofline.py --write"


def test_the_slowest_part_is_the_time():
    gpu = Gpu("toy", bandwidth=10, cache=40, tensor=100, tf32=50, scalar=5)
    assert Work(bytes=20, tensor=100).bound(gpu) == (2, "memory")
    assert Work(bytes=20, tensor=500).bound(gpu) == (5, "products")
    assert Work(bytes=20, tensor=500, cached=240).bound(gpu) == (6, "cache")
    assert Work(bytes=20, tensor=500, scores=20, scalar=20).bound(gpu) == (8, "float32")
    # three products of tf32 each, beside those of bfloat16
    assert Work(bytes=20, tensor=500, scores=50, scalar=20).bound(gpu, exact=False) == (
        8, "products",
    )  # fmt: skip
    assert seconds([Work(10, launches=2), Work(20)], gpu, launch=0.5) == 1 + 2 + 1.5
    assert Work(bytes=4, tensor=8, scalar=2, scores=2).intensity == 3


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_models_are_as_large_as_they_are_known_to_be(model):
    assert read_shape(model.config()).parameters == model.parameters == KNOWN[model.name]


def test_a_slot_is_what_the_cache_stores():
    for model in MODELS:
        layer = read_shape(model.config()).layers[0]
        layout = Layout(model.key_heads, model.size, model.size, 64, {}, torch.bfloat16)
        assert decode.slot_bytes(layer, "bfloat16", 64) == layout.slot_nbytes
        assert decode.token_bytes(layer, "bfloat16") == layout.dense_nbytes


def test_flops_are_those_of_the_formulas():
    shape, case = read_shape(QWEN3.config()), Case(1, 1000, 0.75)
    want = decode_flops(shape, 1000, 0.75, 64)
    works = decode.pruned(shape.layers[0], shape.dtype, case, shape.width)
    attend = works["vote, drop, attend"]
    pair = 2 * 16 * 256  # the formula counts the new token itself, a kernel finds it in registers
    assert attend.tensor * 28 == want["attention"] - 28 * pair
    # every key head votes for itself
    assert (attend.scores / 8 + works["project"].scores) * 28 == want["drop-tokens"]


@pytest.mark.parametrize("launch", [2e-6, 8e-6])
@pytest.mark.parametrize("gpu", [A100, H100], ids=lambda gpu: gpu.name)
def test_both_sides_are_equal_where_pruning_begins_to_win(gpu, launch):
    shape = read_shape(LLAMA_1B.config())
    layer = shape.layers[0]

    def times(context):
        own = Case(16, context, 0.8)
        works = decode.pruned(layer, shape.dtype, own, shape.width).values()
        return seconds(decode.dense(layer, shape.dtype, own), gpu, launch), seconds(
            works, gpu, launch
        )

    context = decode.break_even(shape, Case(16, 0, 0.8), gpu, launch)
    dense, pruned = times(context)
    assert dense == pytest.approx(pruned)
    assert times(2 * context)[0] > times(2 * context)[1]
    assert times(context / 2)[0] < times(context / 2)[1]
    assert decode.break_even(shape, Case(16, 0, 0.05), gpu, launch) == math.inf
    assert 0.05 < decode.least_sparsity(layer, "bfloat16") < 0.08


def test_a_step_where_nothing_can_be_pruned_costs_the_same():
    shape = read_shape(LLAMA_1B.config(num_hidden_layers=1))
    layer = shape.layers[0]
    from dataclasses import replace

    slides = replace(shape, layers=(replace(layer, window=64),))
    dense, pruned = decode.step(slides, Case(4, 4096), A100, 2e-6)
    assert dense == pruned
    assert decode.step(shape, Case(64, 65536), A100, 2e-6)[0] > 3 * dense


def test_training_is_dearer_until_tiles_die():
    layer, text = read_shape(LLAMA_1B.config()).layers[0], Text(4, 2048)
    flash = tokens.flash(layer, "bfloat16", text)
    dense = seconds(flash.values(), A100)
    assert flash["backward"].tensor == 2.5 * flash["forward"].tensor

    def ratio(alive, per_head=False):
        works = tokens.training(layer, "bfloat16", text._replace(alive=alive), per_head)
        return seconds(works.values(), A100, exact=False) / dense

    assert ratio(1.0, per_head=True) > 2 * ratio(1.0) > 2 > 2 * ratio(0.2)
    works = tokens.training(layer, "bfloat16", text)
    backward = sum(work.tensor for name, work in works.items() if name not in tokens.FORWARD)
    assert backward == 9 / 5 * flash["backward"].tensor


def test_blocks_are_free_only_if_whole_stretches_are_gone():
    layer, text = read_shape(LLAMA_1B.config()).layers[0], Text(1, 8192)
    full = tokens.flash(layer, "bfloat16", text, backward=False)["forward"].tensor
    for packed, share in ((False, 1.0), (True, 0.2)):
        attention = tokens.prefill(layer, "bfloat16", text, 0.8, packed)["attention"]
        assert attention.tensor == pytest.approx(share * full, rel=1e-9)


SMALL = Decoder("small", 96, 160, 1, 6, 2, 32, 64)


@pytest.mark.parametrize("norms", [False, True], ids=["Llama", "Qwen3"])
@pytest.mark.parametrize("tune", ["lora", "all"])
def test_what_a_layer_keeps_for_its_backward_pass(norms, tune):
    model, run = SMALL._replace(norms=norms), Run(2, 130, tune, rank=16, triton=False)
    assert kept(model, run, 2) - kept(model, run, 1) == saved_by_layer(model, run)
    checkpointed = run._replace(checkpointing=True)
    assert (
        kept(model, checkpointed, 2, checkpoint=True)
        - kept(model, checkpointed, 1, checkpoint=True)
        == 4 * model.width * 2 * 130
    )


def kept(model, run, layers, checkpoint=False):
    """Bytes that autograd keeps in a forward pass, without parameters and buffers."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = model.config(num_hidden_layers=layers, max_position_embeddings=256)
    config.dtype = torch.float32
    host = AutoModelForCausalLM.from_config(config)
    if run.tune == "lora":
        lora.add(host, run.lora_rank, 32.0)
    kvprune.attach(host, kvprune.PruningConfig(rank=run.rank, alpha=1.5))
    set_trainable(host, run.tune)
    host.train()
    if checkpoint:
        host.gradient_checkpointing_enable({"use_reentrant": False})
    own = {x.untyped_storage().data_ptr() for x in [*host.parameters(), *host.buffers()]}
    seen: dict[int, torch.Tensor] = {}

    def keep(x):
        place = x.untyped_storage().data_ptr()
        if place not in own:
            seen[place] = x
        return x

    ids = torch.randint(model.vocabulary, (run.rows, run.length))
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        host.base_model(ids, use_cache=False)
    return sum(x.untyped_storage().nbytes() for x in seen.values())


def test_what_is_trained():
    from transformers import AutoModelForCausalLM

    host = AutoModelForCausalLM.from_config(SMALL.config(max_position_embeddings=64))
    lora.add(host, 16, 32.0)
    trained = sum(p.numel() for name, p in host.named_parameters() if "lora_" in name)
    assert trained == lora_weights(SMALL, 16)
    pruned = kvprune.attach(host, kvprune.PruningConfig(rank=8))
    trained += sum(p.numel() for p in pruned.interactions.parameters())
    assert fine_tuning(SMALL, Run(1, 8, rank=8)).trained == 16 * trained
    with_teacher, alone = (fine_tuning(SMALL, Run(1, 8, "all", distill=d)) for d in (True, False))
    assert with_teacher.total - alone.total == 4 * SMALL.parameters
    assert alone.trained == 12 * SMALL.parameters + 16 * (2 * SMALL.width * 64 + 1)
