"""model.save_pretrained while pruning is attached: everything that kvprune.load needs."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import kvprune
import model_folders
from helpers import random_ids, randomise_lora, uneven_gates
from kvprune import PruneError, PruningConfig
from kvprune.adapters import lora
from kvprune.adapters.saved_file import FILE
from training_runs import make_rows, small_model


@pytest.fixture(params=["gpt2", "llama"])
def base(request, tmp_path):
    """A model from a folder, so that an adapter knows where its base is."""
    small_model(request.param).save_pretrained(tmp_path / "base")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()


def logits(model, ids=None):
    with torch.no_grad():
        return model(random_ids(2, 24) if ids is None else ids, use_cache=False).logits


def attached(model, with_lora: bool = False) -> kvprune.Pruned:
    if with_lora:
        lora.add(model, rank=4, alpha=8)
        randomise_lora(model)
    pruned = kvprune.attach(model, PruningConfig(rank=8))
    uneven_gates(pruned)
    return pruned


@pytest.mark.parametrize("with_lora", [False, True])
def test_the_folder_loads_as_the_same_pruned_model(base, tmp_path, with_lora):
    pruned = attached(base, with_lora)
    want = logits(base)
    base.save_pretrained(tmp_path / "out")
    again = kvprune.load(tmp_path / "out")
    assert torch.equal(logits(again.model), want)
    assert again.config == pruned.config
    assert again.sparsity().total > 0.05
    assert lora.has_lora(again.model) == with_lora
    again.model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(kvprune.load(tmp_path / "again").model), want)
    # and by the other way to write it
    pruned.save(tmp_path / "adapter")
    assert (tmp_path / "adapter" / FILE).read_bytes() == (tmp_path / "out" / FILE).read_bytes()


def test_weights_of_the_model_itself_are_written(base, tmp_path):
    attached(base)
    with torch.no_grad():
        base.get_input_embeddings().weight.mul_(0.5)
    want = logits(base)
    base.save_pretrained(tmp_path / "out", max_shard_size="20KB")
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    assert torch.equal(logits(kvprune.load(tmp_path / "out").model), want)


def test_a_method_without_weights(base, tmp_path):
    kvprune.attach(base, kvprune.LocalConfig(window=5))
    base.save_pretrained(tmp_path / "out")
    again = kvprune.load(tmp_path / "out")
    assert again.config == kvprune.LocalConfig(window=5)
    assert torch.equal(logits(again.model), logits(base))


def test_a_merged_model_is_written_whole_or_not_at_all(base, tmp_path):
    attached(base, with_lora=True).save(tmp_path / "adapter")
    merged = kvprune.load(tmp_path / "base", tmp_path / "adapter", merge=True)
    with pytest.raises(PruneError, match=r"merged into the weights.*model.save_pretrained\(folder"):
        merged.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not merged.has_base
    merged.model.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(kvprune.load(tmp_path / "out").model), logits(merged.model))


def test_after_detach_it_is_the_models_own(base, tmp_path):
    attached(base).detach()
    base.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / FILE).exists()
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()), logits(base)
    )
    # LoRA that kvprune.load put on is gone, too: all weights are written
    attached(base, with_lora=True).save(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    kvprune.load(model, tmp_path / "adapter").detach()
    model.save_pretrained(tmp_path / "plain")
    names = {file.name for file in (tmp_path / "plain").iterdir()}
    assert names.isdisjoint({FILE, lora.WEIGHTS, lora.CONFIG})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert torch.equal(logits(again), logits(model))


def test_a_copied_model_writes_its_own_weights(base, tmp_path):
    pruned = attached(base)
    clone = copy.deepcopy(base)
    want = logits(clone)
    with torch.no_grad():
        for parameter in pruned.model.parameters():
            parameter.zero_()
    clone.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(kvprune.load(tmp_path / "out").model), want)


def test_a_given_state_dict_is_what_is_written(base, tmp_path):
    attached(base)
    state = {name: tensor * 0.9 for name, tensor in base.state_dict().items()}
    base.save_pretrained(tmp_path / "out", state_dict=dict(state))
    base.load_state_dict(state)
    assert torch.equal(logits(kvprune.load(tmp_path / "out").model), logits(base))
    # one without interaction weights is for somebody who writes them himself
    plain = {name: tensor for name, tensor in state.items() if "interaction" not in name}
    base.save_pretrained(tmp_path / "plain", state_dict=plain)
    assert not (tmp_path / "plain" / FILE).exists()


def test_only_the_main_process_writes(base, tmp_path):
    attached(base)
    base.save_pretrained(tmp_path / "out", False)
    assert not (tmp_path / "out" / FILE).exists()


def test_lora_of_any_name(base, tmp_path):
    import peft

    config = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    base.add_adapter(peft.LoraConfig(**config), "mine")
    randomise_lora(base)
    pruned = attached(base)
    assert lora.rank(base) == 2
    base.save_pretrained(tmp_path / "out")
    assert torch.equal(logits(kvprune.load(tmp_path / "out").model), logits(base))
    base.add_adapter(peft.LoraConfig(**config), "other")
    base.set_adapter(["mine", "other"])
    with pytest.raises(PruneError, match="mine, other are active at once"):
        pruned.save(tmp_path / "two")
    assert not (tmp_path / "two" / FILE).exists()


# ---- the hub


@pytest.mark.parametrize("with_lora", [False, True])
def test_push_to_hub_uploads_everything(base, monkeypatch, with_lora):
    uploaded = []

    def commit(operations, **_):
        uploaded.extend(operation.path_in_repo for operation in operations)

    api = SimpleNamespace(
        create_repo=lambda name, **_: SimpleNamespace(repo_id=name), create_commit=commit
    )
    card = SimpleNamespace(save=lambda path: None)
    monkeypatch.setattr("transformers.utils.hub.hf_api", lambda: api)
    monkeypatch.setattr("transformers.utils.hub.create_and_tag_model_card", lambda *_, **__: card)
    attached(base, with_lora)
    base.push_to_hub("me/forgetful")
    assert {FILE, lora.WEIGHTS if with_lora else "model.safetensors"} <= set(uploaded)


def test_pushing_while_saving_is_refused(base, tmp_path):
    attached(base)
    with pytest.raises(PruneError, match=r"call model.push_to_hub\(name\)"):
        base.save_pretrained(tmp_path / "out", push_to_hub=True)
    assert not (tmp_path / "out").exists()


# ---- transformers' own Trainer


class WithSparsity(Trainer):
    """As a user would write it, without ours."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        return model(**inputs).loss + 0.3 * self.pruned.sparsity_loss()


def trainer(folder, steps: int, with_lora: bool = False, family: str = "gpt2") -> WithSparsity:
    model = small_model(family)
    pruned = attached(model, with_lora)
    pruned.alpha = 1.5
    arguments = TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=4, use_cpu=True,
        report_to=[], disable_tqdm=True, learning_rate=1e-2, dataloader_pin_memory=False,
        lr_scheduler_type="constant",
    )  # fmt: skip
    made = WithSparsity(model, arguments, train_dataset=make_rows(24))
    made.pruned = pruned
    return made


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_checkpoint_of_the_plain_trainer_is_resumed(tmp_path, family):
    whole = trainer(tmp_path / "whole", 4, family=family)
    whole.train()
    trainer(tmp_path / "run", 2, family=family).train()
    resumed = trainer(tmp_path / "run", 4, family=family)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], weight), name
    loaded = kvprune.load(tmp_path / "run" / "checkpoint-4")
    assert torch.equal(logits(loaded.model), logits(whole.model.eval()))
    new = attached(small_model(family)).interactions.state_dict()
    assert not torch.equal(
        whole.pruned.interactions.state_dict()["0.key.weight"], new["0.key.weight"]
    )


def test_a_checkpoint_of_the_plain_trainer_with_lora(tmp_path):
    small_model().save_pretrained(tmp_path / "base")
    made = trainer(tmp_path / "run", 2, with_lora=True)
    made.model.config.name_or_path = str(tmp_path / "base")
    made.train()
    folder = tmp_path / "run" / "checkpoint-2"
    assert {FILE, lora.WEIGHTS, lora.CONFIG} <= {file.name for file in folder.iterdir()}
    assert torch.equal(logits(kvprune.load(folder).model), logits(made.model.eval()))


# ---- the tokenizer beside it


def test_the_tokenizer_of_a_saved_model(tmp_path):
    path = model_folders.save(tmp_path)
    pruned = kvprune.load(path / "model", path / "adapter")
    pruned.model.save_pretrained(tmp_path / "out")
    # none was written there: that of the base
    assert kvprune.load(tmp_path / "out").tokenizer.eos_token == "<end>"
    pruned.tokenizer.add_special_tokens({"eos_token": "<stop>"})
    pruned.tokenizer.save_pretrained(tmp_path / "out")
    assert kvprune.load(tmp_path / "out").tokenizer.eos_token == "<stop>"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "llama"
