"""A LoRA folded into the weights by ourselves, against peft's own merge."""

import json

import pytest
import torch
from test_lora import randomise_lora
from torch.testing import assert_close

import kvprune
from helpers import random_ids, uneven_gates
from kvprune.adapters import lora
from kvprune.adapters.fold import fold
from training_runs import small_model

DTYPES = [torch.float32, torch.bfloat16]


def saved_lora(folder, family="llama", **options):
    model = small_model(family)
    lora.add(model, rank=4, alpha=6)
    randomise_lora(model)
    lora.save(model, folder)
    if options:
        file = folder / lora.CONFIG
        file.write_text(json.dumps(json.loads(file.read_text()) | options))
    return folder


def merged_by_peft(folder, dtype, family="llama"):
    model = small_model(family).to(dtype)
    lora.add_saved(model, folder)
    lora.merge(model)
    return model.state_dict()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_peft(tmp_path, dtype):
    folder = saved_lora(tmp_path)
    model = small_model("llama").to(dtype)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert fold(model, folder)
    want, got = merged_by_peft(folder, dtype), model.state_dict()
    assert got.keys() == want.keys()
    changed = [name for name in got if not torch.equal(got[name], before[name])]
    assert len(changed) == 7 * model.config.num_hidden_layers
    for name, weight in got.items():
        assert weight.dtype == dtype
        if dtype == torch.float32:
            assert torch.equal(weight, want[name]), name
        else:
            assert_close(weight, want[name], atol=2**-8, rtol=2**-7)


@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True}, {"use_rslora": True}, {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {"q_proj": 2}}, {"lora_bias": True}, {"bias": "all"},
        {"modules_to_save": ["lm_head"]}, {"fan_in_fan_out": True}, {"peft_type": "IA3"},
        {"a_setting_of_the_future": 1},
    ],
)  # fmt: skip
def test_other_kinds_are_left_to_peft(tmp_path, options):
    folder = saved_lora(tmp_path, **options)
    model = small_model("llama")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert not fold(model, folder)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_other_layers_and_models_are_left_to_peft(tmp_path):
    # GPT-2 stores its weights the other way round
    assert not fold(small_model("gpt2"), saved_lora(tmp_path / "gpt2", "gpt2"))
    folder = saved_lora(tmp_path / "llama")
    assert not fold(small_model("llama", num_hidden_layers=1), folder)
    assert not fold(small_model("llama", hidden_size=32, head_dim=16), folder)


def test_an_adapter_loads_without_peft(tmp_path, monkeypatch):
    model = small_model("llama")
    lora.add(model, rank=4, alpha=8)
    randomise_lora(model)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned)
    pruned.save(tmp_path)
    ids = random_ids(2, 24)
    with torch.no_grad():
        want = model(ids, use_cache=False).logits
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    again = small_model("llama")
    kvprune.load(again, tmp_path, merge=True)
    with torch.no_grad():
        assert_close(again(ids, use_cache=False).logits, want, atol=1e-4, rtol=1e-4)
