"""Invariants that every supported model passes, on tiny random models from configs."""

import copy

import pytest
import torch
from torch.testing import assert_close

import kvprune
import zoo
from helpers import random_ids, real_tokens, uneven_gates
from naive import naive_pruning

# float32 noise of logits of size 1.5; the recurrent layers of Qwen3-Next amplify it
TOLERANCE = {"qwen3_next": 5e-4}
ALL = list(zoo.ZOO)


def positions(real):
    """Left padding moves the positions; some models do not see to that by themselves."""
    return (real.cumsum(-1) - 1).clamp(min=0)


def forward(model, ids, real):
    return model(
        ids, attention_mask=real.long(), position_ids=positions(real), use_cache=False
    ).logits


@pytest.fixture(params=ALL)
def case(request):
    return request.param, zoo.make(request.param), TOLERANCE.get(request.param, 5e-5)


def test_open_gates_change_nothing_and_detach_leaves_no_trace(case):
    _, model, tolerance = case
    ids, real = random_ids(2, 40), real_tokens(2, 40, "left")
    modules = list(model.state_dict())
    config = model.config
    with torch.no_grad():
        want, want_padded = model(ids).logits, forward(model, ids, real)
        with kvprune.attach(model, kvprune.PruningConfig(rank=8, beta=1e4)) as pruned:
            assert_close(model(ids).logits, want, atol=tolerance, rtol=0)
            assert pruned.sparsity().total == 0
            got = forward(model, ids, real)
            assert_close(got[real], want_padded[real], atol=tolerance, rtol=0)
            pruned.hard = False
            assert_close(model(ids).logits, want, atol=tolerance, rtol=0)
        assert torch.equal(model(ids).logits, want)
    assert list(model.state_dict()) == modules
    assert model.config is config


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("alpha", [float("inf"), 1.0, 3.0])
def test_equals_the_naive_model(case, alpha, padding):
    """Hard and soft, padded: the logits of a model pruned with n × n matrices."""
    _, model, tolerance = case
    ids, real = random_ids(2, 48), real_tokens(2, 48, padding)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8, alpha=min(alpha, 1e9)))
    uneven_gates(pruned)
    pruned.hard = alpha == float("inf")
    with torch.no_grad():
        got = forward(model, ids, real)
        share = pruned.sparsity()
        weights = {
            layer.name: copy.deepcopy(layer.interaction).state_dict() for layer in pruned.layers
        }
        pruned.detach()
        dense = forward(model, ids, real)
        with naive_pruning(model, weights, real, alpha):
            want = forward(model, ids, real)
    assert 0.05 < share.total < 0.99, share
    assert (want - dense)[real].abs().max() > 0.1, "pruning changed nothing"
    assert_close(got[real], want[real], atol=4 * tolerance, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "gpt_neox", "gpt_oss", "deepseek_v3"])
def test_later_tokens_change_no_earlier_output(name):
    model = zoo.make(name)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8, alpha=2.0))
    uneven_gates(pruned)
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
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8, alpha=1.5, depth_tied=depth_tied))
    uneven_gates(pruned)
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
    """Half precision elsewhere changes hidden states a little, but no score is rounded to it."""
    model = zoo.make(name)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8, alpha=1.5))
    uneven_gates(pruned)
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
        model.eval().to(torch.bfloat16)  # casts the interactions too; their maths stays float32


@pytest.mark.parametrize(
    ("name", "says"),
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
def test_refused_with_a_reason(name, says):
    model = zoo.make(name)
    before = dict(model.state_dict())
    with pytest.raises(kvprune.PruneError, match=says):
        kvprune.attach(model)
    assert model.state_dict().keys() == before.keys()


@pytest.mark.parametrize(
    ("name", "layers", "kind"),
    [("gemma2", 2, "sliding attention"), ("llama4", 1, "chunked attention"), ("gpt2", 3, None)],
)
def test_says_which_layers_are_left_alone(name, layers, kind):
    pruned = kvprune.attach(zoo.make(name))
    assert len(pruned.layers) == len(pruned.interactions) == layers
    assert set(pruned.left_alone.values()) == ({kind} if kind else set())
    assert ("left alone" in repr(pruned)) == bool(kind)
