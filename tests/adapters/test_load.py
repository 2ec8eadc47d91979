"""kvprune.load of what the trainer saves: full models and adapters."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import fake_hub
import kvprune
from helpers import random_ids
from kvprune import PruneError
from training_runs import make_trainer, small_model


@pytest.fixture(scope="module", params=["all", "interaction", "lora"])
def trained(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    small_model().save_pretrained(folder / "base")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    trainer = make_trainer(folder / "run", model=base, tune=request.param, steps=4, base_lr=1e-2)
    trainer.train()
    trainer.save_model(str(folder / "out"))
    return trainer, folder


def logits(model, ids):
    with torch.no_grad():
        return model.eval()(ids, use_cache=False).logits


def test_load_needs_only_the_folder(trained):
    trainer, folder = trained
    ids = random_ids(2, 24)
    again = kvprune.load(folder / "out")
    assert again.config == trainer.config.method
    assert torch.equal(logits(again.model, ids), logits(trainer.pruned.model, ids))
    mask = torch.ones_like(ids)
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    want = trainer.pruned.model.generate(ids, **options)
    assert torch.equal(again.model.generate(ids, **options), want)


def test_files_in_the_folder(trained):
    trainer, folder = trained
    files = {file.name for file in (folder / "out").iterdir()}
    assert "kvprune.safetensors" in files
    assert ("model.safetensors" in files) == (trainer.config.tune == "all")
    assert ("adapter_model.safetensors" in files) == (trainer.config.tune == "lora")


def test_adapters_load_onto_a_name_or_a_model(trained):
    trainer, folder = trained
    ids = random_ids(2, 24)
    if trainer.config.tune == "all":
        with pytest.raises(PruneError, match="full fine-tuned model"):
            kvprune.load(str(folder / "base"), folder / "out")
        base = AutoModelForCausalLM.from_pretrained(folder / "out")
    else:
        by_name = kvprune.load(str(folder / "base"), folder / "out")
        assert torch.equal(logits(by_name.model, ids), logits(trainer.pruned.model, ids))
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
    onto = kvprune.load(base, folder / "out")
    assert torch.equal(logits(onto.model, ids), logits(trainer.pruned.model, ids))


def test_plain_transformers_reads_a_full_model_as_the_dense_one(trained, recwarn):
    trainer, folder = trained
    names = {path.name for path in (folder / "out").iterdir()}
    full = trainer.config.tune == "all"
    # an adapter is small because the base model's weights are not in it
    assert ({"config.json", "model.safetensors"} <= names) == full
    assert ("model.safetensors" in names) == full
    if full:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder / "out", output_loading_info=True
        )
        assert not report["unexpected_keys"]
        assert not report["missing_keys"]
        assert model.config.use_cache
        ids = random_ids(2, 24)
        with trainer.pruned.dense():
            torch.testing.assert_close(
                logits(model, ids), logits(trainer.pruned.model, ids), atol=1e-5, rtol=1e-5
            )


def test_errors_of_loading(tmp_path, trained):
    with pytest.raises(PruneError, match="lacks the folder"):
        kvprune.load(small_model())
    with pytest.raises(PruneError, match="does not exist"):
        kvprune.load(tmp_path / "nowhere")
    trainer, folder = trained
    copied = shutil.copytree(folder / "out", tmp_path / "out")
    if trainer.config.tune == "all":
        (copied / "model.safetensors").unlink()
        with pytest.raises(PruneError, match="cannot load the model"):
            kvprune.load(copied)
    else:
        with pytest.raises(PruneError, match="cannot load the model"):
            kvprune.load(str(tmp_path / "nothing"), copied)


def test_a_name_on_the_hub(trained, monkeypatch):
    trainer, folder = trained
    fetched = fake_hub.publish(monkeypatch, {"someone/forgetful": folder / "out"})
    assert kvprune.load("someone/forgetful").config == trainer.config.method
    assert "someone/forgetful" in fetched
