"""Models whose norms and gated activations are computed by our kernels."""

import copy

import pytest
import torch
from torch import nn

import zoo
from helpers import random_ids
from kvprune.integration import fused
from kvprune.integration.fused import fuse, unfuse


def replaced(model) -> set[str]:
    """The kinds of modules that are fused."""
    return {type(m).__name__ for m in model.modules() if "forward" in vars(m)}


FUSED = {
    "llama": {"LlamaRMSNorm", "LlamaMLP"},
    "qwen3": {"Qwen3RMSNorm", "Qwen3MLP"},
    "granite": {"GraniteRMSNorm", "GraniteMLP"},
    # rounds once, after the weight
    "olmo2": {"Olmo2MLP"},
    # multiplies by 1 + weight, and has GELU
    "gemma": set(),
    "gemma2": set(),
    "gpt2": set(),
    # gates and values from one product
    "phi3": {"Phi3RMSNorm"},
}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_fused(name, dtype):
    model, ids = zoo.make(name).to(dtype), random_ids(2, 70)
    with torch.no_grad():
        want = model(ids).logits
        fuse(model)
        fuse(model)  # once is enough
        assert replaced(model) == FUSED[name]
        got = model(ids).logits
        # random weights make a rounding grow from layer to layer
        error = (got - want).float().norm() / want.float().norm()
        assert error < (1e-5 if dtype is torch.float32 else 0.03)
        unfuse(model)
        assert not replaced(model)
        assert torch.equal(model(ids).logits, want)


def test_kernels_are_called(monkeypatch):
    calls = []
    for name in ("rms_norm", "swiglu"):
        kernel = getattr(fused, name)
        monkeypatch.setattr(
            fused, name, lambda *args, f=kernel, name=name: calls.append(name) or f(*args)
        )
    model, ids = zoo.make("qwen3"), random_ids(1, 3)
    fuse(model)
    with torch.no_grad():
        model(ids)
    # four norms and an MLP in each layer, and the last norm
    assert calls.count("rms_norm") == 3 * 4 + 1
    assert calls.count("swiglu") == 3
    calls.clear()
    model(ids)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(ids)
    with torch.no_grad():
        model.double()(ids)
    assert not calls


def test_gradients_are_those_of_the_model():
    model, ids = zoo.make("llama"), random_ids(2, 9)
    twin = copy.deepcopy(model)
    fuse(twin)
    for each in (model, twin):
        each(ids).logits.square().mean().backward()
    for (name, weight), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(weight.grad, other.grad), name


def test_a_copy_has_its_own_weights():
    model, ids = zoo.make("llama"), random_ids(2, 9)
    fuse(model)
    with torch.no_grad():
        want = model(ids).logits
        twin = copy.deepcopy(model)
        for weight in model.parameters():
            weight.zero_()
        assert torch.equal(twin(ids).logits, want)


def test_the_probe_does_not_trust_weights_of_one():
    # 1 · x is the same whether it is rounded before or after
    olmo = zoo.make("olmo2")
    assert all((m.weight == 1).all() for m in olmo.modules() if "RMSNorm" in type(m).__name__)
    fuse(olmo)
    assert "Olmo2RMSNorm" not in replaced(olmo)


def test_a_forward_of_someone_else_stays():
    model = zoo.make("llama")
    mlp = model.model.layers[1].mlp
    mlp.forward = lambda x: torch.zeros_like(x)
    fuse(model)
    x = torch.ones(1, 64)
    assert mlp(x).count_nonzero() == 0
    unfuse(model)
    assert mlp(x).count_nonzero() == 0


def test_hooks_and_arguments_by_name():
    model, seen = zoo.make("llama"), []
    fuse(model)
    layer, x = model.model.layers[0], torch.ones(1, 64)
    layer.mlp.act_fn.register_forward_hook(lambda *_: seen.append("act_fn"))
    with torch.no_grad():
        assert torch.equal(layer.mlp(x), layer.mlp(x=x))
        assert seen == ["act_fn"] * 2
        want = layer.input_layernorm(x)
        torch.testing.assert_close(layer.input_layernorm(hidden_states=x), want)


class BoundedMLP(nn.Module):
    """Has the parts, and computes something else for large numbers."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(4, 4) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))


class NeedyRMSNorm(nn.Module):
    """Has the parts, and cannot be called with one argument."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(4)), 1e-5

    def forward(self, x, gate):
        return self.weight * x * gate


@pytest.mark.parametrize("other", [BoundedMLP, NeedyRMSNorm])
def test_others_with_the_same_parts_are_left_alone(other):
    model = nn.Sequential(other())
    state = torch.get_rng_state()
    fuse(model)
    assert not replaced(model)
    assert torch.equal(torch.get_rng_state(), state)
