"""LoRA together with pruning: in peft's format, and fully removable."""

import pytest
import torch
from torch.testing import assert_close

import kvprune
from helpers import random_ids, randomise_lora, uneven_gates
from kvprune import PruneError, PruningConfig
from kvprune.adapters import lora
from training_runs import small_model


def generated(model, ids):
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
    )
    return made.tolist()


@pytest.fixture(params=["gpt2", "llama"])
def saved(request, tmp_path):
    """A model with LoRA and pruning, and the folder of its adapter."""
    model = small_model(request.param)
    lora.add(model, rank=4, alpha=8)
    randomise_lora(model)
    pruned = kvprune.attach(model, PruningConfig(rank=8))
    uneven_gates(pruned)
    pruned.save(tmp_path / "adapter")
    return request.param, pruned, tmp_path / "adapter"


@pytest.mark.parametrize("merge", [False, True])
def test_round_trip_and_generation(saved, merge):
    family, pruned, path = saved
    ids = random_ids(2, 24)
    model = small_model(family)
    again = kvprune.load(model, path, merge=merge)
    assert generated(model, ids) == generated(pruned.model, ids)
    assert generated(model, ids) != generated(kvprune.attach(small_model(family)).model, ids)
    with torch.no_grad():
        want = pruned.model(ids, use_cache=False).logits
        got = model(ids, use_cache=False).logits
    if merge:
        assert_close(got, want, atol=1e-4, rtol=1e-4)
        assert not lora.has_lora(model)
    else:
        assert torch.equal(got, want)
    assert again.sparsity().total > 0.05


def test_detach_removes_lora(saved):
    family, _, path = saved
    model, ids = small_model(family), random_ids(2, 24)
    want, kinds = model(ids).logits, [type(m) for m in model.modules()]
    trainable = [p.requires_grad for p in model.parameters()]
    kvprune.load(model, path).detach()
    assert torch.equal(model(ids).logits, want)
    assert [type(m) for m in model.modules()] == kinds
    assert not lora.has_lora(model)
    assert [p.requires_grad for p in model.parameters()] == trainable
    kvprune.load(model, path)


def test_peft_reads_it_without_kvprune(saved):
    peft = pytest.importorskip("peft")
    family, pruned, path = saved
    ids = random_ids(2, 24)
    theirs = peft.PeftModel.from_pretrained(small_model(family), str(path)).eval()
    ours = pruned.detach()
    with torch.no_grad():
        assert_close(theirs(ids).logits, ours(ids).logits)


def test_the_file_is_small(saved):
    _, _, path = saved
    sizes = {file.name: file.stat().st_size for file in path.iterdir()}
    assert set(sizes) >= {"kvprune.safetensors", "adapter_model.safetensors", "adapter_config.json"}
    assert "model.safetensors" not in sizes


def test_lora_of_another_model_is_refused(saved):
    family, _, path = saved
    width = {"n_embd": 32} if family == "gpt2" else {"hidden_size": 32, "head_dim": 16}
    other = small_model(family, **width)
    with pytest.raises(PruneError, match="hidden_size"):
        kvprune.load(other, path)
    assert not lora.has_lora(other)
    layers = {"n_layer": 1} if family == "gpt2" else {"num_hidden_layers": 1}
    other = small_model(family, **layers)
    with pytest.raises(PruneError, match="another model"):
        kvprune.load(other, path)
    assert not lora.has_lora(other)


def test_a_second_lora_is_refused(saved):
    _, pruned, path = saved
    model = pruned.detach()
    with pytest.raises(PruneError, match="LoRA already"):
        lora.add(model, 2, 4)
    with pytest.raises(PruneError, match="LoRA already"):
        kvprune.load(model, path)


def test_error_without_peft(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(PruneError, match=r"pip install 'kvprune\[train\]'"):
        lora.add(small_model(), 2, 4)
