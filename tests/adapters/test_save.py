"""Saving and loading: exact, and with clear errors for what does not fit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvprune
import zoo
from helpers import random_ids, uneven_gates
from kvprune import PruneError, PruningConfig
from kvprune.adapters.saved_file import FILE


@pytest.fixture
def saved(tmp_path):
    model = zoo.make("llama")
    pruned = kvprune.attach(model, PruningConfig(rank=8, beta=1.5, protect_first=2, alpha=3.0))
    uneven_gates(pruned)
    pruned.save(tmp_path / "adapter")
    return model, tmp_path / "adapter"


def test_round_trip(saved):
    model, path = saved
    ids = random_ids(2, 30)
    again = zoo.make("llama")
    for place in (path, path / FILE, str(path)):
        pruned = kvprune.load(again, place)
        assert pruned.config == PruningConfig(rank=8, beta=1.5, protect_first=2, alpha=3.0)
        with torch.no_grad():
            assert torch.equal(again(ids).logits, model(ids).logits)
        assert pruned.sparsity().total > 0.05
        pruned.detach()


@pytest.mark.parametrize(
    "config", [kvprune.DenseConfig(), kvprune.LocalConfig(7), kvprune.StridedConfig(4)]
)
def test_baselines_are_saved(config, tmp_path):
    with kvprune.attach(zoo.make("gpt2"), config) as pruned:
        pruned.save(tmp_path)
    assert kvprune.load(zoo.make("gpt2"), tmp_path).config == config


def test_metadata_of_the_file(saved):
    from safetensors import safe_open

    with safe_open(saved[1] / FILE, "pt") as opened:
        about = json.loads(opened.metadata()["kvprune"])
    assert about["version"] == kvprune.__version__
    assert about["config"]["method"] == "pruning"
    assert about["base"]["model_type"] == "llama"
    assert len(about["layers"]) == 3


def altered(path, change, about_change=lambda about: None):
    from safetensors import safe_open

    tensors = load_file(path / FILE)
    with safe_open(path / FILE, "pt") as opened:
        about = json.loads(opened.metadata()["kvprune"])
    change(tensors)
    about_change(about)
    save_file(tensors, path / FILE, metadata={"kvprune": json.dumps(about)})


def test_nan_is_neither_saved_nor_loaded(saved):
    _, path = saved
    before = (path / FILE).read_bytes()
    model = zoo.make("llama")
    pruned = kvprune.attach(model, PruningConfig(rank=8))
    with torch.no_grad():
        pruned.interactions[1].key.weight[0, 0] = float("nan")
    with pytest.raises(PruneError, match="not saved"):
        pruned.save(path)
    assert (path / FILE).read_bytes() == before
    pruned.detach()
    altered(path, lambda tensors: next(iter(tensors.values())).fill_(float("inf")))
    with pytest.raises(PruneError, match="NaN or Inf"):
        kvprune.load(model, path)
    kvprune.attach(model).detach()  # nothing was left attached


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: zoo.make("gpt2"), "model_type 'llama'"),
        (lambda: zoo.make("llama", hidden_size=32, head_dim=16), "hidden_size 64"),
        (lambda: zoo.make("llama", num_hidden_layers=2), "another model"),
    ],
)
def test_an_adapter_of_another_model_is_refused(saved, make, says):
    model = make()
    with pytest.raises(PruneError, match=says):
        kvprune.load(model, saved[1])
    kvprune.attach(model).detach()


def test_a_wrong_shape_is_refused(saved):
    def shorten(tensors):
        for name in list(tensors):
            if "query" in name:
                tensors[name] = tensors[name][:3].contiguous()

    altered(saved[1], shorten)
    with pytest.raises(PruneError, match=r"shape \(3, 64\)"):
        kvprune.load(zoo.make("llama"), saved[1])


def test_unknown_settings_and_formats_are_refused(saved):
    _, path = saved
    altered(path, lambda tensors: None, lambda about: about["config"].update(colour="red"))
    with pytest.raises(PruneError, match="colour"):
        kvprune.load(zoo.make("llama"), path)
    altered(path, lambda tensors: None, lambda about: about.update(format=99))
    with pytest.raises(PruneError, match="format 99"):
        kvprune.load(zoo.make("llama"), path)


def test_missing_or_damaged_files(saved, tmp_path):
    model = zoo.make("llama")
    with pytest.raises(PruneError, match="does not exist"):
        kvprune.load(model, tmp_path / "nowhere")
    data = (saved[1] / FILE).read_bytes()
    (saved[1] / FILE).write_bytes(data[: len(data) // 2])
    with pytest.raises(PruneError, match="damaged"):
        kvprune.load(model, saved[1])
    save_file({"x": torch.zeros(1)}, saved[1] / FILE)
    with pytest.raises(PruneError, match="not written by kvprune"):
        kvprune.load(model, saved[1])
