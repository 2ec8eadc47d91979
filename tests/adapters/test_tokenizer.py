"""What a Pruned brings with it: its tokenizer, generate and the device."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import fake_registry
import kvprune
import model_folders
import zoo
from kvprune import PrunedCache, PruneError, PruningConfig
from kvprune.adapters import pretrained
from kvprune.adapters.load import load_with_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """model has "<end>", adapter and whole have tokenizers of their own beside them."""
    path = model_folders.save(tmp_path_factory.mktemp("folders"))
    for name in ("adapter", "whole"):
        tokenizer = model_folders.byte_tokenizer()
        tokenizer.add_special_tokens({"eos_token": f"<{name}>"})
        tokenizer.save_pretrained(path / name)
    return path


def test_the_tokenizer_of_what_was_loaded(folders):
    model, adapter, whole = (folders / name for name in ("model", "adapter", "whole"))
    base = AutoModelForCausalLM.from_pretrained(model)
    assert kvprune.load(adapter).tokenizer.eos_token == "<adapter>"
    assert kvprune.load(whole).tokenizer.eos_token == "<whole>"
    assert kvprune.load(base, adapter).tokenizer.eos_token == "<adapter>"
    # by name, that of the base: the same as the commands use
    assert kvprune.load(model, adapter).tokenizer.eos_token == "<end>"
    loaded = load_with_tokenizer(str(model), str(adapter))
    assert loaded.model.tokenizer is loaded.tokenizer


def test_the_tokenizer_of_a_registered_name(monkeypatch, tmp_path):
    fake_registry.register(monkeypatch, tmp_path)
    fake_registry.packed(tmp_path, "little-80", default=True)
    for name in ("little", "little-80", "little-dense"):
        assert kvprune.load(name).tokenizer.eos_token == "<end>"


def test_the_tokenizer_of_a_model_from_a_folder(folders):
    model = AutoModelForCausalLM.from_pretrained(folders / "model")
    assert kvprune.attach(model).tokenizer.eos_token == "<end>"


def test_it_is_loaded_once_and_only_if_it_is_used(folders, monkeypatch):
    loads = []

    def load(name):
        loads.append(name)
        return model_folders.byte_tokenizer()

    monkeypatch.setattr(pretrained, "load_tokenizer", load)
    pruned = kvprune.load(folders / "adapter")
    assert loads == []
    assert pruned.tokenizer is pruned.tokenizer
    assert loads == [str(folders / "adapter")]


def test_a_model_without_a_tokenizer(tmp_path):
    pruned = kvprune.attach(zoo.make("gpt2"))
    with pytest.raises(PruneError, match=r"no name to load a tokenizer by; set pruned.tokenizer"):
        _ = pruned.tokenizer
    pruned.tokenizer = tokenizer = model_folders.byte_tokenizer()
    assert pruned.tokenizer is tokenizer
    for family in ("gpt2", "llama"):
        zoo.make(family).save_pretrained(tmp_path / family)
        pruned = kvprune.attach(AutoModelForCausalLM.from_pretrained(tmp_path / family))
        says = "(?s)cannot load the tokenizer.*; set pruned.tokenizer = AutoTokenizer"
        with pytest.raises(PruneError, match=says):
            _ = pruned.tokenizer


def test_text_in_text_out(folders):
    """The first lines of a user: nothing but the name."""
    pruned = kvprune.load(folders / "adapter")
    inputs = pruned.tokenizer("Hello there, you", return_tensors="pt").to(pruned.device)
    out = pruned.generate(**inputs, max_new_tokens=9, return_dict_in_generate=True)
    assert isinstance(out.past_key_values, PrunedCache)
    want = pruned.model.generate(**inputs, max_new_tokens=9)
    assert torch.equal(out.sequences, want)
    assert pruned.tokenizer.decode(out.sequences[0]).startswith("Hello there, you")
    assert pruned.device == torch.device("cpu")


def test_generate_after_detach_is_refused():
    """It would write with the dense model, without a word."""
    pruned = kvprune.attach(zoo.make("llama"), PruningConfig(rank=8))
    pruned.detach()
    with pytest.raises(PruneError, match=r"pruning was detached; call model.generate"):
        pruned.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
