"""kvprune generate, run as a user runs it, on a small model saved to disk."""

import json

import pytest
import torch
from test_cli import run

import kvprune
import model_folders
import zoo
from helpers import uneven_gates


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, its tokenizer of bytes and an adapter."""
    path = tmp_path_factory.mktemp("model")
    model_folders.byte_tokenizer().save_pretrained(path)
    model = zoo.make("llama", vocab_size=257, max_position_embeddings=200)
    model.save_pretrained(path)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned)
    pruned.save(path / "adapter")
    return path


def test_one_prompt(folder):
    done = run(
        "generate", str(folder), "Once upon a time", "--adapter", str(folder / "adapter"),
        "--max-new-tokens", "60",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 10
    assert "60 tokens" in done.stderr
    assert "of the context; cache" in done.stderr


def test_json_equals_the_library(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    done = run("generate", str(folder), "Hello", "--adapter", str(folder / "adapter"), "--json",
               "--max-new-tokens", "40")  # fmt: skip
    result = json.loads(done.stdout)
    assert 0 < result["kept_share"] < 0.9
    assert result["cache_bytes"] < result["dense_bytes"]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    kvprune.load(model, folder / "adapter")
    ids = tokenizer("Hello", return_tensors="pt").input_ids
    out = model.generate(
        ids, max_new_tokens=40, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    assert tokenizer.decode(out[0, 5:], skip_special_tokens=True) == result["texts"][0]


def test_sampled_tokens_depend_on_the_seed(folder):
    def text(*more):
        done = run("generate", str(folder), "Hello", "--json", "--max-new-tokens", "20", *more)
        return json.loads(done.stdout)["texts"]

    first = text("--sample", "--seed", "1")
    assert text("--sample", "--seed", "1") == first
    assert text("--sample", "--seed", "2") != first
    # a temperature near 0 is greedy decoding
    assert text("--sample", "--temperature", "0.001") == text()


def test_a_file_of_prompts(folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("One\n\nTwo and three\n")
    done = run("generate", str(folder), "--prompts", str(file), "--json", "--max-new-tokens", "9")
    result = json.loads(done.stdout)
    assert len(result["texts"]) == 2
    assert result["kept_share"] > 0.7  # no adapter: dense, less only for the pads


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["", "--max-new-tokens", "5"], "prompt 0 is empty"),
        (["word " * 60], "200 positions"),
        (["hi", "--adapter", "nowhere"], "does not exist"),
        (["hi", "--prompts", "nowhere.txt"], "both given"),
    ],
)
def test_errors(folder, arguments, says):
    done = run("generate", str(folder), *arguments)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_model():
    done = run("generate", "./no-such-model", "hi")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr
