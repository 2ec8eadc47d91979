"""kvprune train, as a user runs it: on the package's small model and a text file."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from typer.testing import CliRunner

import kvprune
from kvprune import LocalConfig, PruneError, tiny
from kvprune.cli import app

SRC = Path(kvprune.__file__).parent.parent
QUICK = (
    "--length", "48", "--batch", "2", "--log-every", "1", "--probe-every", "2",
    "--probe-rows", "2", "--held-out", "6",
)  # fmt: skip


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """The first chapters of a book; its tokens are cached in the same folder."""
    folder = tmp_path_factory.mktemp("text")
    file = folder / "book.txt"
    with gzip.open(tiny.text_file("train"), "rt", encoding="utf-8") as text:
        file.write_text(text.read(20_000), encoding="utf-8")
    return file


def options(book: Path, *more: str) -> list[str]:
    return ["train", "tiny", "--data", str(book), "--cache-dir", str(book.parent), *QUICK, *more]


def call(*args: str):
    """Run in this process; returns the JSON that it prints."""
    done = CliRunner().invoke(app, [*args, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def start(*args: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}
    if launcher:
        environment["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, *launcher, "-m", "kvprune", *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


@pytest.fixture(scope="module")
def finished(book, tmp_path_factory):
    """A complete run of six steps, in one process."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    more = ("--steps", "6", "--save-every", "2", "--batch", "4", "--target-sparsity", "0.5")
    return call(*options(book, "--out", str(folder), *more)), folder


def test_files_of_a_run(finished):
    result, folder = finished
    assert result["steps"] == 6
    assert 0 <= result["metrics"]["eval_sparsity_hard"] <= 1
    for name in ("README.md", "recipe.yaml", "kvprune.safetensors", "tokenizer.json"):
        assert (folder / name).is_file(), name
    assert list(folder.glob("runs/**/events.out.tfevents.*")), "the log for TensorBoard"
    card = (folder / "README.md").read_text()
    assert f"{result['metrics']['eval_ppl_hard']:.2f}" in card
    assert "base_model: tiny" in card
    assert "- book.txt" in card
    assert str(folder.parent) not in card
    # evaluated once at the end, not again to report it
    state = json.loads((folder / "checkpoint-6/trainer_state.json").read_text())
    assert [e["step"] for e in state["log_history"] if "eval_loss" in e] == [6]


def test_missed_target_is_reported(book, tmp_path):
    """Two steps cannot prune 95 %: said on stderr, in the JSON and in the card."""
    out = tmp_path / "missed"
    args = options(book, "--out", str(out), "--steps", "2", "--target-sparsity", "0.95", "--json")
    done = CliRunner().invoke(app, args, catch_exceptions=False)
    missed = json.loads(done.stdout)["missed_target"]
    assert missed.startswith("the target was missed: ")
    assert "pruned instead of 95.0% after 2 steps" in missed
    assert f"kvprune: {missed}" in done.stderr
    assert missed[1:] in (out / "README.md").read_text()


def test_recipe_reproduces_the_run(finished, tmp_path):
    result, folder = finished
    again = call("train", "--recipe", str(folder / "recipe.yaml"), "--out", str(tmp_path / "again"))
    assert again["metrics"]["eval_loss_hard"] == result["metrics"]["eval_loss_hard"]


def test_run_is_not_overwritten(finished, book):
    _, folder = finished
    with pytest.raises(PruneError, match=r"contains a run already \(checkpoint-6\); continue"):
        call(*options(book, "--out", str(folder)))


def test_killed_and_resumed(finished, tmp_path):
    result, folder = finished
    recipe, out = ["--recipe", str(folder / "recipe.yaml")], tmp_path / "killed"
    process = start("train", *recipe, "--out", str(out))
    checkpoint = out / "checkpoint-2"
    while not checkpoint.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (out / "README.md").exists(), "it was killed too late"
    again = call("train", *recipe, "--out", str(out), "--resume")
    assert again["steps"] == 6
    want = result["metrics"]["eval_loss_hard"]
    assert again["metrics"]["eval_loss_hard"] == pytest.approx(want, rel=1e-6)


def test_two_processes_match_one(finished, tmp_path):
    _, folder = finished
    # on a CPU the launcher starts only one process, unless it expects GPUs
    launcher = (
        "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
        "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", "0",
    )  # fmt: skip
    out = tmp_path / "two"
    process = start(
        "train", "--recipe", str(folder / "recipe.yaml"), "--batch", "2", "--out", str(out),
        launcher=launcher,
    )  # fmt: skip
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors[-4000:]
    curves = []
    for place in (folder, out):
        state = json.loads((place / "checkpoint-6/trainer_state.json").read_text())
        curves.append([e["loss"] for e in state["log_history"] if "loss" in e])
        assert state["log_history"][-1]["eval_sparsity_hard"] >= 0
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        one, two = (kvprune.load(place).model(ids).logits for place in (folder, out))
    assert_close(two, one, atol=2e-3, rtol=2e-3)


def test_adapter_finds_its_base(book, tmp_path):
    out = str(tmp_path / "adapter")
    call(*options(book, "--out", out, "--steps", "2", "--tune", "lora", "--distill", "1"))
    assert not (tmp_path / "adapter/model.safetensors").exists()
    assert kvprune.load(out).config.rank == 64
    done = CliRunner().invoke(
        app, ["generate", out, "Once", "--max-new-tokens", "3"], catch_exceptions=False
    )
    assert done.exit_code == 0


def test_start_from_an_earlier_run(book, tmp_path):
    """With other settings, from its weights: one step at a rate of 0 leaves them as they were."""
    lora = options(book, "--tune", "lora", "--lora-rank", "2", "--rank", "8", "--distill", "1")
    first, then = str(tmp_path / "first"), str(tmp_path / "then")
    call(*lora, "--steps", "2", "--out", first)
    still = ("--steps", "1", "--interaction-lr", "0", "--base-lr", "0", "--gamma", "3")
    call(*lora, *still, "--start", first, "--out", then)
    for name in ("kvprune.safetensors", "adapter_model.safetensors"):
        before, after = (load_file(f"{folder}/{name}") for folder in (first, then))
        assert before.keys() == after.keys()
        for key, tensor in before.items():
            assert_close(tensor, after[key], rtol=0, atol=0)
    assert f"start: {first}" in (tmp_path / "then/recipe.yaml").read_text()
    other = options(book, "--tune", "lora", "--lora-rank", "4", "--rank", "8")
    with pytest.raises(PruneError, match="rank 2, but lora_rank is 4"):
        call(*other, "--start", first, "--out", str(tmp_path / "other"))
    with pytest.raises(PruneError, match="contains an adapter, which tune='all' cannot continue"):
        call(*options(book), "--start", first, "--out", str(tmp_path / "all"))
    with pytest.raises(PruneError, match="nowhere is not a folder to continue from"):
        call(*options(book), "--start", "nowhere", "--out", str(tmp_path / "none"))


def test_full_model_continues_with_its_base_as_teacher(finished, book, tmp_path):
    """The teacher is the original base model, not the fine-tuned one."""
    _, folder = finished
    then = tmp_path / "then"
    still = ("--steps", "1", "--interaction-lr", "0", "--base-lr", "0", "--distill", "1")
    call(*options(book, *still), "--start", str(folder), "--out", str(then))
    before, after = (load_file(place / "model.safetensors") for place in (folder, then))
    for key, tensor in before.items():
        assert_close(tensor, after[key], rtol=0, atol=0)
    (state,) = then.glob("checkpoint-*/trainer_state.json")
    (entry,) = [e for e in json.loads(state.read_text())["log_history"] if "loss_kl" in e]
    assert entry["loss_kl"] > 1e-3


def test_baseline(book, tmp_path):
    out = str(tmp_path / "local")
    result = call(
        *options(book, "--out", out, "--steps", "2", "--method", "local", "--window", "8")
    )
    assert result["metrics"]["eval_sparsity_hard"] == pytest.approx(0.7, abs=0.1)
    assert kvprune.load(out).config == LocalConfig(8)


def test_plain_text_output(book, tmp_path):
    args = options(book, "--out", str(tmp_path / "run"), "--steps", "1")
    done = CliRunner().invoke(app, args, catch_exceptions=False)
    assert "1 step" in done.stdout
    assert "hard" in done.stdout


def test_errors(book, tmp_path):
    out = ("--out", str(tmp_path / "none"))
    for args, message in (
        (["train", "tiny", *out], "no text to train on"),
        (options(book, *out, "--length", "4096"), "4096 tokens do not fit into the 512 positions"),
        (options(book, *out, "--method", "local"), "method local needs --window"),
        (["train", str(tmp_path), "--data", str(book), *out], "cannot load the model"),
        (options(tmp_path / "missing.txt", *out), "missing.txt"),
        (options(book, *out, "--rank", "0"), "rank=0"),
    ):
        with pytest.raises(PruneError, match=message):
            CliRunner().invoke(app, args, catch_exceptions=False)
    assert not (tmp_path / "none").exists()


def test_every_setting_has_a_flag():
    from dataclasses import fields

    from kvprune.text.config import DataConfig
    from kvprune.train.config import TrainConfig

    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "200"}).stdout
    for config in (TrainConfig, DataConfig):
        for field in fields(config):
            if field.name not in ("method", "sources"):
                assert f"--{field.name.replace('_', '-')}" in shown


def test_help_is_readable_at_80_columns():
    """Every text has at least a third of the width, and every option a panel of its subject."""
    shown = CliRunner().invoke(app, ["train", "--help"], env={"COLUMNS": "80"}).stdout
    own = {"data", "out", "recipe", "method", "start", "resume", "push", "json", "help"}
    panel = ""
    for line in shown.splitlines():
        if line.startswith("╭─ "):
            panel = line.strip("╭─╮ ")
        option = re.match(r"│ --([a-z0-9-]+).*?(?:<\w+>|TEXT|NAME|N|X)  ", line)
        if line.startswith("│ --"):
            assert option is not None, line
            assert len(line) - option.end() >= 26, line
            assert (panel == "Options") == (option[1] in own), line
    assert panel == "Method"
    assert len(shown.splitlines()) < 180


def test_bfloat16_on_a_cpu(book, tmp_path):
    """transformers asks for a GPU unless it is told that the CPU is meant."""
    more = ("--steps", "2", "--bf16", "--tune", "lora", "--distill", "1", "--average", "2")
    result = call(*options(book, "--out", str(tmp_path / "half"), *more))
    assert result["metrics"]["eval_ppl_hard"] > 1
