"""Every command and function that takes a model's name, with every kind of name."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fake_hub
import fake_registry
import kvprune
import model_folders
from kvprune import Pruned, PruneError
from kvprune.adapters.load import load_with_tokenizer
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.cli import app
from kvprune.evaluate.cost.shape import read_shape
from kvprune.evaluate.throughput.models import load_pair

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TASK = {"goal": "Wash a cup", "sol1": "Use water", "sol2": "Use sand", "label": 0}
# what a name is: whether it prunes, and whether it can be trained
NAMES = {
    "little": (True, True),  # a base with a default adapter; training starts from the base
    "little-80": (True, False),  # an adapter of the package
    "little-dense": (False, True),
    "tiny": (False, True),
    "FOLDER/model": (False, True),
    "FOLDER/adapter": (True, False),
    "FOLDER/whole": (True, True),  # a full fine-tuned model
    "someone/model": (False, True),  # on the hub
    "someone/adapter": (True, False),
    "someone/whole": (True, True),
}
COMMANDS = {
    "generate": "generate NAME Hello --max-new-tokens 3 --json",
    "chat": "chat NAME --template FOLDER/chat.jinja --max-new-tokens 3 --json",
    "explain": "explain NAME Hello --out FOLDER/page.html --json",
    "train": "train NAME --data FOLDER/text.txt --length 16 --steps 1 --batch 1 --rank 4 "
    "--tune interaction --out FOLDER/run --json",
    "perplexity": "eval perplexity NAME --data FOLDER/text.txt --length 16 --max-windows 1 --json",
    "zeroshot": "eval zeroshot NAME --tasks piqa --files FOLDER --json",
    "throughput": "eval throughput NAME --context 8 --batch 1 --sparsity 0.5 --steps 1 "
    "--repeats 1 --text FOLDER/text.txt --json",
    "cost": "eval cost NAME --context 8 --sparsity 0.5 --json",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The models of every kind of name; the hub is away, and some of it is in its cache."""
    path = model_folders.save(tmp_path)
    (path / "chat.jinja").write_text(TEMPLATE)
    (path / "text.txt").write_text("A man went out into the rain and came back with bread. " * 9)
    (path / "piqa_dev.jsonl").write_text(json.dumps(TASK) + "\n")
    fake_registry.register(monkeypatch, tmp_path)
    fake_registry.packed(tmp_path, "little-70", default=True)
    fake_registry.packed(tmp_path, "little-80", seed=1)
    fake_hub.away(monkeypatch, tmp_path)
    for name in ("model", "adapter", "whole"):
        fake_hub.keep(tmp_path, f"someone/{name}", path / name)
    return path


@pytest.fixture
def measured(monkeypatch):
    """The models whose speed would be measured, which takes seconds each."""
    models = []
    monkeypatch.setattr(
        "kvprune.evaluate.throughput.run.throughput", lambda pair, *_: models.append(pair)
    )
    return models


def run(command: str, name: str, folder: Path):
    words = command.replace("NAME", name).replace("FOLDER", str(folder)).split()
    return CliRunner().invoke(app, words, input="Hello\n")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_every_name(folder, measured, command, name):
    prunes, trains = NAMES[name]
    done = run(COMMANDS[command], name, folder)
    if command == "train" and not trains:
        assert isinstance(done.exception, PruneError)
        assert "it is an adapter of" in str(done.exception)
        return
    assert done.exception is None, done.output
    out = json.loads(done.stdout.splitlines()[-1])
    # and it is the pruned model where the name means one
    if command == "generate":
        assert (out["kept_share"] < 1) == prunes
    elif command == "chat":
        assert (out["kept"] < out["seen"]) == prunes
    elif command == "explain":
        assert (out["sparsity"] > 0) == prunes
    elif command in ("perplexity", "zeroshot"):
        assert (out["rows"][-1]["sparsity"] > 0) == prunes
    elif command == "throughput":
        assert (measured[-1].pruned is not None) == prunes


@pytest.mark.parametrize("name", NAMES)
def test_every_function_takes_every_name(folder, name):
    prunes, _ = NAMES[name]
    name = name.replace("FOLDER", str(folder))
    assert load_base(name).num_parameters() == read_shape(name).parameters
    vocabulary = load_tokenizer(name).get_vocab()
    loaded = load_with_tokenizer(name)
    assert isinstance(loaded.model, Pruned) == prunes
    assert loaded.tokenizer.get_vocab() == vocabulary
    assert (load_pair(name).pruned is not None) == prunes
    if prunes or name == "little-dense":
        assert kvprune.load(name).tokenizer.get_vocab() == vocabulary
    else:
        with pytest.raises(PruneError, match="has no adapter"):
            kvprune.load(name)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tinny", "did you mean tiny"),
        ("little-90", "no adapter little-90; use little-70, little-80, or little-dense"),
        ("FOLDER/modle", "this folder does not exist"),
        ("nobody/model", r"has no copy of it from the hub, and http.* \(no network\)"),
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_a_wrong_name_at_once(folder, monkeypatch, command, name, says):
    # nothing is loaded, and nothing is waited for: huggingface_hub sleeps between its attempts
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", None)
    monkeypatch.setattr("time.sleep", None)
    done = run(COMMANDS[command], name, folder)
    with pytest.raises(PruneError, match=says):
        raise done.exception


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("train", "cost")])
def test_every_command_takes_an_adapter_and_refuses_a_wrong_one(folder, measured, command):
    options = COMMANDS[command] + " --adapter "
    for adapter in ("FOLDER/adapter", "someone/adapter", "little-80"):
        assert run(options + adapter, "FOLDER/model", folder).exception is None
    for adapter, says in (
        ("nowhere", "nowhere does not exist; pass the folder that Pruned.save was given"),
        ("FOLDER/model", "kvprune.safetensors does not exist"),
        ("nobody/adapter", "nobody/adapter cannot be attached: it is no folder"),
        ("little-90", "no adapter little-90; use little-70"),
    ):
        done = run(options + adapter, "FOLDER/model", folder)
        with pytest.raises(PruneError, match=says):
            raise done.exception
