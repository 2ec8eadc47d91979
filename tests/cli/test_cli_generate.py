"""kvprune generate, run as a user runs it, on a small model saved to disk."""

import json
import subprocess
import sys

import pytest
import torch
from test_cli import run
from typer.testing import CliRunner

import kvprune
import model_folders
import zoo
from helpers import uneven_gates
from kvprune import PruneError
from kvprune.cli import app


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


def invoke(*arguments):
    """The command in this process: starting another takes longer."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done


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

    done = invoke("generate", folder, "Hello", "--adapter", folder / "adapter", "--json",
                  "--max-new-tokens", 40)  # fmt: skip
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
        done = invoke("generate", folder, "Hello", "--json", "--max-new-tokens", 20, *more)
        return json.loads(done.stdout)["texts"]

    first = text("--sample", "--seed", "1")
    assert text("--sample", "--seed", "1") == first
    assert text("--sample", "--seed", "2") != first
    # a temperature near 0 is greedy decoding
    assert text("--sample", "--temperature", "0.001") == text()


def test_a_file_of_prompts(folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("One\n\nTwo and three\n")
    done = invoke("generate", folder, "--prompts", file, "--json", "--max-new-tokens", 9)
    result = json.loads(done.stdout)
    assert len(result["texts"]) == 2
    # no adapter: dense; the pads of the first prompt are nothing that was dropped
    assert result["kept_share"] == 1.0
    assert result["cache_bytes"] == result["dense_bytes"]


def test_a_cache_larger_than_a_dense_one_says_why(folder):
    done = invoke("generate", folder, "Hello", "--adapter", folder / "adapter",
                  "--max-new-tokens", 2)  # fmt: skip
    assert "more: each token also has an interaction key, and some slots are free" in done.stderr
    done = invoke("generate", folder, "Hello", "--max-new-tokens", 2)
    assert "more:" not in done.stderr


def test_options_of_chat(folder, tmp_path):
    """In one process each: the model's settings, and a chat template."""
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}answer: ")

    def result(*more):
        done = invoke("generate", folder, "Hello there, and more", "--adapter", folder / "adapter",
                      "--json", "--max-new-tokens", 20, *more)  # fmt: skip
        return json.loads(done.stdout)

    plain = result()
    assert result("--threshold", 3)["kept_share"] < plain["kept_share"]
    assert result("--threshold", -9)["kept_share"] == 1.0
    assert result("--protect-first", 60)["kept_share"] == 1.0
    assert result("--protect-recent", 60)["kept_share"] == 1.0
    assert result("--dtype", "bfloat16")["dense_bytes"] == plain["dense_bytes"] / 2
    assert result("--device", "cpu")["texts"] == plain["texts"]
    chat = result("--template", file)
    assert chat["texts"] != plain["texts"]
    # the words of the template are read, too
    assert chat["dense_bytes"] > plain["dense_bytes"]
    with_system = result("--template", file, "--system", "Be kind.")
    assert with_system["dense_bytes"] > chat["dense_bytes"]
    # of the nucleus only the most likely token is left
    sampled = ["--temperature", 5, "--seed", 3]
    assert result(*sampled, "--top-p", 1e-6)["texts"] == plain["texts"]
    assert result(*sampled, "--top-p", 1)["texts"] != plain["texts"]


def test_a_prefix(folder, tmp_path):
    """Read and saved by one command, continued by another."""
    file = tmp_path / "prefix"
    pruned = ["--adapter", folder / "adapter", "--json"]
    done = invoke("generate", folder, "Once upon a time ", "--save-prefix", file, *pruned)
    saved = json.loads(done.stdout)
    assert (saved["file"], saved["tokens"]) == (str(file), 17)
    more = [*pruned, "--max-new-tokens", 15]
    after = json.loads(invoke("generate", folder, "and then", "--prefix", file, *more).stdout)
    whole = json.loads(invoke("generate", folder, "Once upon a time and then", *more).stdout)
    assert after["texts"] == whole["texts"]
    assert after["kept_share"] == pytest.approx(whole["kept_share"])
    done = invoke("generate", folder, "Once", "--save-prefix", file)
    assert f"wrote {file}: 4 tokens" in done.stderr
    assert done.stdout == ""


def test_int8_takes_fewer_bytes_and_a_budget_refuses(folder):
    def size(*options):
        done = invoke("generate", folder, "Hello there, you", "--adapter", folder / "adapter",
                      "--json", "--max-new-tokens", 40, *options)  # fmt: skip
        return json.loads(done.stdout)["cache_bytes"]

    assert size("--kv", "int8") < 0.75 * size()
    assert size("--kv-budget", "1MB") <= 1_000_000
    with pytest.raises(kvprune.BudgetError, match="of the 4,000 that its budget allows"):
        size("--kv-budget", "4KB")


@pytest.mark.parametrize("given", ["argument", "stdin", "blank stdin", "file", "blank file"])
def test_empty_prompts_are_refused_before_torch_is_imported(tmp_path, given):
    file = tmp_path / "prompts.txt"
    file.write_text("" if given == "file" else " \n\t\n\n")
    arguments = [""] if given == "argument" else []
    if "file" in given:
        arguments = ["--prompts", str(file)]
    code = (
        "import sys\nfrom kvprune.cli import main\n"
        "try:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "generate", "tiny", *arguments]
    text = " \n" if "blank" in given else ""
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert ("holds no prompt" if "file" in given else "the prompt is empty") in done.stderr
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["", "--max-new-tokens", "5"], "the prompt is empty"),
        (["hi", "--threshold", "1"], "is dense: there is no threshold"),
        (["hi", "--chat"], "has no chat template"),
        (["hi", "--system", "Be kind"], "has no chat template"),
        (["hi", "--template", "nowhere.jinja"], "cannot read the template"),
        (["hi", "--top-p", "0"], "--top-p 0 leaves no token"),
        (["hi", "--dtype", "float8"], "--dtype float8 is unknown"),
        (["hi", "--device", "abacus"], "try cpu"),
        (["word " * 60], "200 positions"),
        (["hi", "--adapter", "nowhere"], "does not exist"),
        (["hi", "--prompts", "nowhere.txt"], "both given"),
        (["hi", "--prefix", "nowhere"], "there is no file nowhere"),
        (["hi", "--save-prefix", "no/such/file"], "there is no folder no/such"),
        (["hi", "--save-prefix", "file", "--chat"], "one plain text"),
        (["hi", "--kv", "int4"], "--kv int4 is unknown"),
        (["hi", "--kv-budget", "1MB"], "the model is dense: there is no budget"),
    ],
)
def test_errors(folder, arguments, says):
    done = CliRunner().invoke(app, ["generate", str(folder), *arguments])
    assert isinstance(done.exception, PruneError)
    assert says in str(done.exception)


def test_unknown_model():
    done = run("generate", "./no-such-model", "hi")
    assert done.returncode == 2
    assert "no-such-model" in done.stderr
    assert "Traceback" not in done.stderr
