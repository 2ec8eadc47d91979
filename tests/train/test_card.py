"""The model card, and pushing to the hub as transformers does it."""

from pathlib import Path

import pytest
import yaml
from huggingface_hub import HfApi, ModelCard

from kvprune import LocalConfig
from kvprune.train.card import model_card
from training_runs import make_config, make_trainer


@pytest.fixture
def hub(monkeypatch):
    """A hub that accepts everything: the names of the uploaded files, by repository."""
    pushed = {}

    class Repo:
        repo_id = "someone/forgetful"

    def upload(self, *, repo_id, folder_path, **kwargs):
        pushed[repo_id] = {f.name for f in Path(folder_path).iterdir() if f.is_file()}

    monkeypatch.setattr(HfApi, "create_repo", lambda *args, **kwargs: Repo())
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    return pushed


@pytest.mark.parametrize("tune", ["all", "interaction", "lora"])
def test_push_includes_the_card(tmp_path, hub, tune):
    trainer = make_trainer(
        tmp_path, tune=tune, steps=3, arguments={"hub_model_id": "someone/forgetful"}
    )
    trainer.train()
    trainer.push_to_hub(dataset="a/text")
    weights = {"all": "model.safetensors", "lora": "adapter_model.safetensors"}
    wanted = {"README.md", "kvprune.safetensors", weights.get(tune, "kvprune.safetensors")}
    assert hub["someone/forgetful"] >= wanted
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.library_name == "kvprune"
    assert card.data.datasets == ["a/text"]
    entry = trainer.last_evaluation()
    assert f"| {entry['eval_ppl_hard']:.2f} |" in card.text
    assert f"| {entry['eval_sparsity_hard']:.1%} |" in card.text
    assert 'kvprune.load("someone/forgetful")' in card.text


def test_card_content(tmp_path):
    config = make_config(target_sparsity=0.8, distill=0.5)
    book = tmp_path / "our book.txt"
    book.touch()
    text = model_card(
        config, "forgetful", "gpt2", [str(book), "wikitext"], steps=7, license="mit",
        settings={"data": {"length": 32}},
    )  # fmt: skip
    card = ModelCard(text)
    assert card.data.base_model == "gpt2"
    assert card.data.license == "mit"
    assert card.data.datasets == ["wikitext"]
    assert "- our book.txt\n- wikitext\n" in text
    assert str(tmp_path) not in text
    assert "Not measured." in text
    settings = yaml.safe_load(text.split("```yaml")[1].split("```")[0])
    assert settings["train"]["target_sparsity"] == 0.8
    assert settings["train"]["method"]["rank"] == 8
    assert settings["data"] == {"length": 32}
    assert settings["steps_done"] == 7


def test_card_of_a_baseline():
    text = model_card(make_config(method=LocalConfig(8)), "x", "gpt2")
    assert "local attention, a baseline" in text
    assert "Not recorded." in text
    metrics = {"eval_ppl_hard": 3.0, "eval_sparsity_hard": 0.5, "eval_sparsity_hard_layer_0": 0.5}
    measured = model_card(make_config(method=LocalConfig(8)), "x", "gpt2", measured=metrics)
    assert "| | hard gate |" in measured


def test_card_says_that_the_target_was_missed():
    config = make_config(target_sparsity=0.8, gamma=0.3, steps=10)

    def card(reached):
        metrics = {"eval_ppl_hard": 3.0, "eval_sparsity_hard": reached}
        return model_card(config, "x", "gpt2", measured=metrics)

    assert "**The target was missed: 41.0% pruned instead of 80.0% after 10 steps" in card(0.41)
    assert "start with a larger gamma than 0.3" in card(0.41)
    assert "start with a smaller gamma than 0.3" in card(0.9)
    assert "missed" not in card(0.785)
    assert "missed" not in model_card(config, "x", "gpt2")
    assert "missed" not in model_card(make_config(), "x", "gpt2", measured={"eval_ppl_hard": 3.0,
                                      "eval_sparsity_hard": 0.1})  # fmt: skip
