"""Invariants of every supported architecture, on tiny random models built from configs."""

import copy

import pytest
import torch
from torch.testing import assert_close

import kvprune
import zoo
from helpers import attach_uneven, full_logits, random_ids, real_tokens
from naive import naive_pruning

# rounding of float32 logits of about 1.5; the recurrent layers of Qwen3-Next amplify it
TOLERANCE = {"qwen3_next": 5e-4}


@pytest.fixture(params=list(zoo.ZOO))
def model_and_tolerance(request):
    return zoo.make(request.param), TOLERANCE.get(request.param, 5e-5)


def test_open_gates_and_detach_leave_the_model_unchanged(model_and_tolerance):
    model, tolerance = model_and_tolerance
    ids, real = random_ids(2, 40), real_tokens(2, 40, "left")
    names = list(model.state_dict())
    config = model.config
    with torch.no_grad():
        want, want_padded = model(ids).logits, full_logits(model, ids, real)
        with kvprune.attach(model, kvprune.PruningConfig(rank=8, beta=1e4)) as pruned:
            assert_close(model(ids).logits, want, atol=tolerance, rtol=0)
            assert pruned.sparsity().total == 0
            got = full_logits(model, ids, real)
            assert_close(got[real], want_padded[real], atol=tolerance, rtol=0)
            pruned.hard = False
            assert_close(model(ids).logits, want, atol=tolerance, rtol=0)
        assert torch.equal(model(ids).logits, want)
    assert list(model.state_dict()) == names
    assert model.config is config


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("alpha", [float("inf"), 1.0, 3.0])
def test_logits_equal_naive_pruning(model_and_tolerance, alpha, padding):
    """Hard and soft, padded: the logits of a model pruned with n × n matrices."""
    model, tolerance = model_and_tolerance
    ids, real = random_ids(2, 48), real_tokens(2, 48, padding)
    pruned = attach_uneven(model, alpha=min(alpha, 1e9))
    pruned.hard = alpha == float("inf")
    with torch.no_grad():
        got = full_logits(model, ids, real)
        sparsity = pruned.sparsity()
        weights = {
            layer.name: copy.deepcopy(layer.interaction).state_dict() for layer in pruned.layers
        }
        pruned.detach()
        dense = full_logits(model, ids, real)
        with naive_pruning(model, weights, real, alpha):
            want = full_logits(model, ids, real)
    assert 0.05 < sparsity.total < 0.99, sparsity
    assert (want - dense)[real].abs().max() > 0.1, "pruning changed nothing"
    assert_close(got[real], want[real], atol=4 * tolerance, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox", "gpt_oss", "deepseek_v3"])
def test_later_tokens_do_not_change_earlier_outputs(name):
    model = zoo.make(name)
    pruned = attach_uneven(model, alpha=2.0)
    ids = random_ids(1, 40)
    changed = ids.clone()
    changed[:, 30:] = random_ids(1, 10, seed=9)
    for pruned.hard in (True, False):
        with torch.no_grad():
            first, second = model(ids).logits, model(changed).logits
        assert_close(first[:, :30], second[:, :30], atol=1e-5, rtol=0)
        assert (first[:, 30:] - second[:, 30:]).abs().max() > 0.1


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma2", "gpt_neox", "opt"])
@pytest.mark.parametrize("depth_tied", [False, True])
def test_checkpointing_gives_the_same_loss_and_gradients(name, depth_tied):
    model = zoo.make(name)
    pruned = attach_uneven(model, alpha=1.5, depth_tied=depth_tied)
    ids = random_ids(2, 33)
    model.train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        loss = model(ids, labels=ids, use_cache=False).loss + 0.3 * pruned.sparsity_loss()
        loss.backward()
        results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
    (plain, plain_grads), (check, check_grads) = results
    assert_close(check, plain, atol=1e-6, rtol=0)
    for got, want in zip(check_grads, plain_grads, strict=True):
        assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert all(i.query.weight.grad.abs().max() > 0 for i in pruned.interactions)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_bfloat16_autocast_keeps_votes_in_float32(name):
    """Scores stay in float32 although hidden states are computed in half precision."""
    model = zoo.make(name)
    pruned = attach_uneven(model, alpha=1.5)
    ids = random_ids(2, 32)
    dtypes = []
    hook = pruned.interactions[0].register_forward_hook(
        lambda module, args, output: dtypes.extend(x.dtype for x in output)
    )
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss + pruned.sparsity_loss()
    loss.backward()
    hook.remove()
    assert dtypes == [torch.float32] * 3
    assert pruned.sparsity_loss().dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_half_precision_weights(name):
    model = zoo.make(name).to(torch.bfloat16)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8, alpha=1.5))
    assert pruned.interactions[0].query.weight.dtype == torch.float32
    ids = random_ids(2, 32)
    for _ in range(2):
        with torch.no_grad():
            assert model(ids).logits.dtype == torch.bfloat16
        model.train()
        model(ids, labels=ids).loss.backward()
        assert pruned.sparsity_loss().dtype == torch.float32
        # also casts the interactions, which still compute in float32
        model.eval().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bert", "encoder"),
        ("t5", "encoder-decoder"),
        ("falcon", "AttentionInterface"),
        ("bloom", "AttentionInterface"),
        ("gptj", "AttentionInterface"),
        ("mamba", "AttentionInterface"),
        ("mistral_sliding", "sliding_window = None"),
    ],
)
def test_unsupported_models_are_refused_with_a_reason(name, message):
    model = zoo.make(name)
    names = model.state_dict().keys()
    with pytest.raises(kvprune.PruneError, match=message):
        kvprune.attach(model)
    assert model.state_dict().keys() == names


@pytest.mark.parametrize(
    ("name", "layers", "kind"),
    [("gemma2", 2, "sliding attention"), ("llama4", 1, "chunked attention"), ("gpt2", 3, None)],
)
def test_reports_layers_that_are_not_pruned(name, layers, kind):
    pruned = kvprune.attach(zoo.make(name))
    assert len(pruned.layers) == len(pruned.interactions) == layers
    assert set(pruned.left_alone.values()) == ({kind} if kind else set())
    assert ("left alone" in repr(pruned)) == bool(kind)
