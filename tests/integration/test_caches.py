"""Whatever is passed as a cache to an attached model: pruned, or refused; never something else."""

from contextlib import nullcontext

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

import kvprune
import zoo
from helpers import attach_uneven, full_logits, random_ids
from kvprune import DenseConfig, H2OConfig, KeyNormConfig, PrunedCache, PruneError, PruningConfig

FAMILIES = ["gpt2", "llama"]
TOLERANCE = 2e-4


def read_by(model, tokens: int = 6):
    """The cache of an untouched model that has read some tokens."""
    with torch.no_grad():
        return model(random_ids(1, tokens), use_cache=True).past_key_values


class Mine(DynamicCache):
    pass


# what a user may pass, from the untouched model
OTHERS = {
    "a DynamicCache with tokens": read_by,
    "an offloading DynamicCache": lambda model: DynamicCache(offloading=True),
    "a subclass": lambda model: Mine(),
    "a StaticCache": lambda model: StaticCache(config=model.config, max_cache_len=40),
    "an EncoderDecoderCache": lambda model: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "one with tokens": lambda model: EncoderDecoderCache(read_by(model), DynamicCache()),
    "a plain Cache": lambda model: Cache(layer_class_to_replicate=DynamicLayer),
    "a Cache without layers": lambda model: Cache(layers=[]),
    "a tuple of pairs": lambda model: tuple((x.keys, x.values) for x in read_by(model).layers),
    "an empty tuple": lambda model: (),
    "a list": lambda model: [],
    "a name": lambda model: "dynamic",
}
CALLS = {
    "forward": lambda model, ids, cache: model(ids, past_key_values=cache),
    "by position": lambda model, ids, cache: (
        model(ids, cache) if model.config.model_type == "gpt2" else model(ids, None, None, cache)
    ),
    "base model": lambda model, ids, cache: model.base_model(ids, past_key_values=cache),
    "generate": lambda model, ids, cache: model.generate(
        ids, past_key_values=cache, max_new_tokens=3, do_sample=False
    ),
}


def soft(pruned):
    pruned.hard = False
    return nullcontext()


def training(pruned):
    pruned.model.train()
    return nullcontext()


MODES = {
    "eval": lambda pruned: nullcontext(),
    "training": training,
    "soft": soft,
    "every gate open": lambda pruned: pruned.dense(),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("other", OTHERS)
def test_other_caches_are_refused_with_a_remedy(name, mode, other):
    model = zoo.make(name)
    given = OTHERS[other](model)
    pruned = attach_uneven(model)
    says = "kvprune.PrunedCache|call model.eval()" if mode in ("training", "soft") else r"PrunedCa"
    for call in CALLS.values():
        with MODES[mode](pruned), pytest.raises(PruneError, match=says):
            call(model, random_ids(1, 8), given)


@pytest.mark.parametrize("name", [*FAMILIES, "gemma2", "lfm2", "falcon_h1"])
@pytest.mark.parametrize("with_config", [False, True])
def test_an_unused_dynamic_cache_becomes_a_pruned_one(name, with_config):
    """The user's own object: a loop that passes it again goes on where it was."""
    model = zoo.make(name)
    cache = DynamicCache(config=model.config) if with_config else DynamicCache()
    attach_uneven(model)
    ids, logits = random_ids(2, 40), []
    for part in ids.split([25, 1, 1, 13], dim=1):
        with torch.no_grad():
            out = model(part, past_key_values=cache)
        assert out.past_key_values is cache
        logits.append(out.logits)
    want = full_logits(model, ids, torch.ones_like(ids))
    assert_close(torch.cat(logits, 1), want, atol=TOLERANCE, rtol=0)
    assert isinstance(cache, PrunedCache)
    assert cache.get_seq_length() == cache.seen == 40
    assert cache.kept.sum() < cache.kept.numel() * 40


@pytest.mark.parametrize("name", FAMILIES)
def test_generate_goes_on_with_the_users_dynamic_cache(name):
    model = zoo.make(name)
    attach_uneven(model)
    options = {"max_new_tokens": 8, "do_sample": False}
    cache, ids = DynamicCache(), random_ids(1, 20)
    first = model.generate(ids, past_key_values=cache, **options)
    assert cache.get_seq_length() == 27
    turn = torch.cat([first, random_ids(1, 5, seed=1)], 1)
    second = model.generate(turn, past_key_values=cache, **options)
    assert torch.equal(second, model.generate(turn, **options))
    assert cache.get_seq_length() == 40
    # transformers must not undo steps of its own accord in a cache that it hands back
    assert cache._is_user_defined


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dense", ["every gate open", "DenseConfig"])
def test_a_dynamic_cache_without_pruning_gives_the_untouched_model(name, dense):
    model, ids = zoo.make(name), random_ids(2, 30)
    with torch.no_grad():
        want = model(ids).logits
        pruned = kvprune.attach(model, None if dense == "every gate open" else DenseConfig())
        cache = DynamicCache()
        with pruned.dense():
            got = [model(part, past_key_values=cache).logits for part in ids.split(20, dim=1)]
    assert_close(torch.cat(got, 1), want, atol=TOLERANCE, rtol=0)
    assert (cache.kept == 30).all()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("mode", ["training", "soft"])
def test_a_soft_gate_has_no_cache(name, mode):
    """What the model would make itself holds all tokens, and no later call could go on from it."""
    model = zoo.make(name)
    pruned = attach_uneven(model)
    ids = random_ids(2, 12)
    with MODES[mode](pruned):
        for module in (model, model.base_model):
            assert module(ids).past_key_values is None
        assert model(ids, use_cache=False).past_key_values is None
        for given in ({"use_cache": True}, {"past_key_values": PrunedCache(pruned)}):
            with pytest.raises(PruneError, match=r"the gate is soft now; call model.eval\(\)"):
                model(ids, **given)
        with pytest.raises(PruneError, match="the gate is soft now"):
            model.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize("name", FAMILIES)
def test_training_with_a_hard_gate(name):
    model = zoo.make(name)
    kvprune.attach(model, kvprune.LocalConfig(window=5))
    model.train()
    ids = random_ids(1, 12)
    assert model(ids).past_key_values is None
    cache = model(ids, use_cache=True).past_key_values
    assert isinstance(cache, PrunedCache)
    assert cache.kept.max() < 12


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized", "offloaded_static"])
def test_other_kinds_of_generate_are_refused(kind):
    model = zoo.make("llama")
    attach_uneven(model)
    says = rf"cache_implementation='{kind}' cannot be pruned; leave it out \(here and in"
    with pytest.raises(PruneError, match=says):
        model.generate(random_ids(1, 8), cache_implementation=kind, max_new_tokens=2)
    model.generation_config.cache_implementation = kind
    with pytest.raises(PruneError, match=says):
        model.generate(random_ids(1, 8), max_new_tokens=2)


def test_the_paged_kind_of_generate_is_refused():
    model = zoo.make("llama")
    attach_uneven(model)
    with pytest.raises(PruneError, match="generate_batch cannot prune; call generate with a"):
        model.generate(random_ids(1, 8), cache_implementation="paged", max_new_tokens=2)


def test_the_dynamic_kind_of_generate_is_pruned():
    model = zoo.make("llama")
    attach_uneven(model)
    options = {"max_new_tokens": 2, "return_dict_in_generate": True}
    out = model.generate(random_ids(1, 8), cache_implementation="dynamic", **options)
    assert isinstance(out.past_key_values, PrunedCache)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("made_by", "used_by"),
    [
        (PruningConfig(rank=8), PruningConfig(rank=16)),
        (DenseConfig(), PruningConfig(rank=8)),
        (PruningConfig(rank=8), DenseConfig()),
        (H2OConfig(budget=6), KeyNormConfig(budget=6)),
    ],
)
def test_a_cache_of_another_method_is_refused(made_by, used_by, tokens):
    ids = random_ids(1, 10)
    with torch.no_grad():
        cache = kvprune.attach(zoo.make("llama"), made_by).model(ids).past_key_values
        model = kvprune.attach(zoo.make("llama"), used_by).model
        with pytest.raises(PruneError, match="made for another model or another method"):
            model(ids[:, :tokens], past_key_values=cache)


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_cache_from_inside_of_dense_is_refused_outside(tokens):
    pruned = kvprune.attach(zoo.make("llama"), H2OConfig(budget=6))
    with torch.no_grad():
        with pruned.dense():
            cache = pruned.model(random_ids(1, 10)).past_key_values
        with pytest.raises(PruneError, match="another method"):
            pruned.model(random_ids(1, tokens), past_key_values=cache)


EMPTY = {
    "ids": lambda model: model(torch.empty(1, 0, dtype=torch.long)),
    "by name": lambda model: model(input_ids=torch.empty(2, 0, dtype=torch.long)),
    "no rows": lambda model: model(torch.empty(0, 5, dtype=torch.long)),
    "embeddings": lambda model: model(inputs_embeds=torch.empty(1, 0, 64)),
    "without cache": lambda model: model(torch.empty(1, 0, dtype=torch.long), use_cache=False),
    "base model": lambda model: model.base_model(torch.empty(1, 0, dtype=torch.long)),
    "training": lambda model: model.train()(torch.empty(1, 0, dtype=torch.long)),
    "generate": lambda model: model.generate(torch.empty(1, 0, dtype=torch.long)),
    "a tokenizer's": lambda model: model.generate(torch.empty(1, 0)),
}


@pytest.mark.parametrize("name", [*FAMILIES, "stablelm"])
@pytest.mark.parametrize("call", EMPTY)
def test_no_tokens_are_refused(name, call):
    model = zoo.make(name)
    attach_uneven(model)
    with pytest.raises(
        PruneError,
        match=r"has the shape \(.*\): there is no token to read; give the model at least one",
    ):
        EMPTY[call](model)


def test_no_tokens_to_trace_or_after_a_cache_are_refused():
    model = zoo.make("llama")
    pruned = attach_uneven(model)
    with pytest.raises(PruneError, match="there is no token to read"):
        pruned.trace([])
    cache = model(random_ids(1, 8)).past_key_values
    with pytest.raises(PruneError, match="there is no token to read"):
        model(random_ids(1, 8)[:, 8:], past_key_values=cache)
    assert cache.seen == 8
