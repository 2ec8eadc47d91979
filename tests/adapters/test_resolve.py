"""Every function that takes a model's name understands the same names."""

import time

import pytest
import torch

import fake_registry
import kvprune
import model_folders
from kvprune import DenseConfig, PruneError
from kvprune.adapters.load import load_with_tokenizer
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.adapters.resolve import Location, resolve, resolve_base
from kvprune.evaluate.cost.shape import read_shape
from kvprune.text.config import DataConfig
from kvprune.train.config import TrainConfig
from kvprune.train.recipe import Recipe
from kvprune.train.run import run


@pytest.fixture
def adapters(monkeypatch, tmp_path):
    """little with its adapters little-50 (the default) and little-80."""
    folder = fake_registry.register(monkeypatch, tmp_path)
    fake_registry.packed(tmp_path, "little-50", default=True)
    fake_registry.packed(tmp_path, "little-80", seed=1)
    return folder


@pytest.fixture
def no_hub(monkeypatch):
    """Fail as soon as a name is looked up on the hub."""

    def refuse(*args, **kwargs):
        raise AssertionError("the hub was contacted")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    for auto in ("AutoModelForCausalLM", "AutoTokenizer", "AutoConfig"):
        monkeypatch.setattr(f"transformers.{auto}.from_pretrained", refuse)


NAMES = ["little", "little-50", "little-80", "little-dense"]


@pytest.mark.parametrize("name", NAMES)
def test_base_tokenizer_and_shape_of_a_registered_name(adapters, name):
    tokenizer, base = load_tokenizer(name), load_base(name)
    assert tokenizer.get_vocab() == model_folders.byte_tokenizer().get_vocab()
    assert base.config.name_or_path == "little"
    assert not hasattr(base.model.layers[0].self_attn, "_kvprune")
    shape = read_shape(name)
    assert shape.name == name
    assert shape.parameters == sum(p.numel() for p in base.parameters())


def test_a_dense_name_loads_the_base_with_every_gate_open(adapters):
    pruned = kvprune.load("little-dense")
    assert pruned.config == DenseConfig()
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(pruned.model(ids).logits, load_base("little")(ids).logits)
    assert pruned.sparsity().total == 0


def test_an_adapter_replaces_the_one_that_the_name_stands_for(adapters, tmp_path):
    want = Location("little", "little", "mine")
    assert resolve("little", "mine") == want
    assert resolve("little-80", "mine") == want
    assert resolve("little-dense", "mine") == want


def test_folders_of_training(tmp_path):
    path = model_folders.save(tmp_path)
    model, adapter, full = (str(path / name) for name in ("model", "adapter", "whole"))
    assert resolve(model) == Location(model, model)
    assert resolve(adapter) == Location(model, model, adapter)
    assert resolve(full) == Location(full, full, full, model)
    assert resolve_base(adapter) == Location(model, model)
    assert resolve_base(full) == Location(full, full)
    # a tokenizer that training saved with the adapter comes first
    model_folders.byte_tokenizer().save_pretrained(adapter)
    assert resolve(adapter) == Location(model, adapter, adapter)
    assert load_tokenizer(adapter).eos_token == "<end>"
    assert load_base(adapter).config.name_or_path == model


def test_names_that_may_be_on_the_hub_are_not_checked():
    for name in ("gpt2", "distilgpt2", "someone/model"):
        assert resolve(name) == Location(name, name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tinny", "did you mean tiny"),
        ("smolm2-135m", "did you mean smollm2-135m"),
        ("gpt-2", "did you mean gpt2"),
        ("no-such-model", "cannot load the model 'no-such-model': pass a folder"),
        ("TINY", "did you mean tiny"),
        ("./no/such", "'./no/such': this folder does not exist"),
        ("./such", r"'\./such': this folder does not exist"),
        ("/no/such", "'/no/such': this folder does not exist"),
        ("a--b/model", "'a--b/model': this folder does not exist"),
        ("what is this", "cannot load the model 'what is this': pass a folder"),
    ],
)
@pytest.mark.parametrize(
    "function", [kvprune.load, load_base, load_tokenizer, load_with_tokenizer, read_shape]
)
def test_an_unknown_name_fails_at_once(no_hub, function, name, says):
    start = time.perf_counter()
    with pytest.raises(PruneError, match=says):
        function(name)
    assert time.perf_counter() - start < 1


def test_an_unknown_adapter_of_a_known_base(adapters, no_hub):
    for function in (kvprune.load, load_base, load_tokenizer, read_shape):
        with pytest.raises(PruneError, match="no adapter little-70; use little-50, little-80"):
            function("little-70")


def test_a_base_without_an_adapter_is_not_loaded_as_pruned():
    with pytest.raises(PruneError, match=r"tiny has no adapter.*kvprune.load\('tiny', folder\)"):
        kvprune.load("tiny")


def test_training_does_not_start_from_an_adapters_base(adapters, tmp_path):
    recipe = Recipe("little-80", DataConfig("books"), TrainConfig())
    with pytest.raises(PruneError, match="is an adapter of little; train little, with --start"):
        run(recipe, tmp_path / "run")
