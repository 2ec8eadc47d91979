"""One object per forward pass: nothing of one call reaches another."""

import gc
import weakref

import pytest
import torch
from torch.testing import assert_close

import kvprune
import zoo
from helpers import attach_uneven, random_ids
from kvprune import PruneError


@pytest.fixture
def model():
    return zoo.make("llama")


@pytest.fixture
def pruned(model):
    return attach_uneven(model, alpha=1.5)


@pytest.mark.parametrize("cached", [False, True])
def test_a_mask_that_is_edited_in_place(model, pruned, cached):
    ids, mask = random_ids(2, 20), torch.ones(2, 20, dtype=torch.bool)
    options = {"use_cache": cached}
    with torch.no_grad():
        model(ids, attention_mask=mask, **options)
        mask[1, :8] = False
        got = model(ids, attention_mask=mask, **options).logits
        want = model(ids, attention_mask=mask.clone(), **options).logits
    assert torch.equal(got, want)


def test_an_evaluation_does_not_touch_the_training_pass(model, pruned):
    ids = random_ids(2, 24)
    model.train()
    model(ids, use_cache=False)
    want = pruned.sparsity_loss()
    with torch.no_grad(), pruned.evaluating(), pruned.dense():
        model(random_ids(1, 8, seed=3), use_cache=False)
    pruned.trace(random_ids(1, 9, seed=4))
    assert pruned.sparsity_loss() == want
    assert pruned.sparsity_loss().requires_grad
    assert pruned.last_pass.drop_step().shape == (3, 1, 9)


def test_the_second_run_of_a_checkpointed_layer_leaves_nothing(model, pruned):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    ids = random_ids(2, 16)
    loss = model(ids, labels=ids, use_cache=False).loss
    before = [id(layer.kept) for layer in pruned.last_pass.ordered()]
    (loss + pruned.sparsity_loss()).backward()
    assert [id(layer.kept) for layer in pruned.last_pass.ordered()] == before


@pytest.mark.parametrize("depth_tied", [False, True])
def test_two_passes_before_one_backward(depth_tied):
    """With checkpointing, both run again; each with its own mask and its own lower layers."""
    ids, mask = random_ids(2, 16), torch.ones(2, 16, dtype=torch.long)
    mask[1, :6] = 0
    grads = []
    for checkpointing in (False, True):
        model = zoo.make("llama").train()
        pruned = attach_uneven(model, alpha=1.5, depth_tied=depth_tied)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        total = 0
        for given in (mask, None):
            out = model(ids, attention_mask=given, labels=ids, use_cache=False)
            total = total + out.loss + pruned.sparsity_loss()
        total.backward()
        grads.append([p.grad for p in model.parameters()])
    for got, want in zip(*grads, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_that_is_over_is_freed(model, pruned, checkpointing):
    """Without a backward pass, too: nothing that the graph holds leads back to what it left."""
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model(random_ids(2, 16), use_cache=False)
    kept = weakref.ref(pruned.last_pass.ordered()[0].kept)
    assert kept() is not None
    model(random_ids(2, 16), use_cache=False)
    gc.collect()
    assert kept() is None


def test_a_cache_that_is_let_go_is_freed(model, pruned):
    with torch.no_grad():
        out = model(random_ids(1, 16))
        out = model(random_ids(1, 1), past_key_values=out.past_key_values)
    cache = weakref.ref(out.past_key_values)
    assert cache() is not None
    del out
    gc.collect()
    assert cache() is None


def test_an_error_on_the_way(model, pruned):
    ids = random_ids(1, 12)
    want = pruned.trace(ids)
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids)
    hook.remove()
    assert pruned.last_pass.drop_step().equal(want)
    assert torch.equal(pruned.trace(ids), want)
    model(ids)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt", "stablelm"])
def test_the_base_model_can_be_called_itself(name):
    model = zoo.make(name)
    pruned = attach_uneven(model)
    ids = random_ids(2, 20)
    with torch.no_grad():
        model(ids, use_cache=False)
        want = pruned.last_pass.drop_step()
        out = model.base_model(ids, use_cache=True)
    assert isinstance(out.past_key_values, kvprune.PrunedCache)
    assert torch.equal(pruned.last_pass.drop_step(), want)


def test_layers_hold_no_state(model, pruned):
    model(random_ids(1, 8))
    assert set(vars(pruned.layers[0])) == {"name", "index", "number", "interaction"}


def test_every_layer_has_to_use_our_attention(model, pruned):
    model.set_attn_implementation("eager")
    with pytest.raises(PruneError, match=r"layers\.0\.self_attn did not use kvprune's attention"):
        model(random_ids(1, 8))
