"""kvprune eval as a user runs it, in this process: starting one takes longer than the runs."""

import gzip
import json
import random
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import kvprune
import model_folders
from kvprune import PruneError
from kvprune.adapters.load import load_with_tokenizer
from kvprune.cli import app
from kvprune.evaluate.dense import dense_reference
from kvprune.evaluate.perplexity.measure import perplexity
from kvprune.text.held_out import held_out_tokens
from kvprune.text.rows import DataConfig, load_rows
from kvprune.train.recipe import make_recipe, to_yaml

WORDS = ["the", "man", "went", "out", "into", "rain", "and", "came", "back", "with", "bread"]


def cli(*args: object) -> str:
    """Standard output of kvprune eval."""
    result = CliRunner().invoke(app, ["eval", *map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A model, an adapter, a model with pruning of its own and a text."""
    path = model_folders.save(tmp_path_factory.mktemp("eval"))
    chosen = random.Random(0).choices(WORDS, k=150)
    with gzip.open(path / "text.txt.gz", "wt") as out:
        out.write(" ".join(chosen))
    return path


@pytest.fixture(autouse=True)
def token_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPRUNE_CACHE", str(tmp_path / "cache"))


def by_hand(root, **options):
    """The same through the library."""
    text = gzip.decompress((root / "text.txt.gz").read_bytes()).decode()
    ids = torch.tensor([*model_folders.byte_tokenizer()(text)["input_ids"], 0])
    pruned = kvprune.load(root / "model", root / "adapter")
    return [row.to_dict() for row in perplexity(pruned, ids, **options)]


def test_perplexity_json_equals_the_library(root):
    out = cli("perplexity", root / "model", "--adapter", root / "adapter", "--json",
              "--data", root / "text.txt.gz", "--length", 60, "--contexts", "30,60")  # fmt: skip
    got = json.loads(out)
    want = by_hand(root, contexts=[30, 60], length=60, dense="open")
    assert got["rows"] == want
    assert got["about"]["windows"] > 5
    assert got["rows"][-1]["sparsity"] > 0.05
    assert got["rows"][-1]["kl"] > 1e-3


def test_perplexity_options_reach_the_library(root):
    out = cli("perplexity", root / "model", "--adapter", root / "adapter", "--json",
              "--data", root / "text.txt.gz", "--length", 60, "--stride", 20, "--max-windows", 3,
              "--path", "cached", "--chunk", 7, "--batch", 2, "--no-dense")  # fmt: skip
    got = json.loads(out)
    want = by_hand(root, length=60, stride=20, max_windows=3, path="cached", chunk=7, batch=2)
    assert got["rows"] == want
    assert got["about"]["windows"] == 3
    assert "kl" not in got["rows"][0]


def test_what_a_run_held_out_is_all_that_is_read(root, tmp_path):
    words = random.Random(1)
    texts = [" ".join(words.choices(WORDS, k=30)) for _ in range(20)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "docs.jsonl").write_text(lines)
    config = DataConfig((str(tmp_path / "docs.jsonl"),), 60, held_out=0.3)
    tokenizer = model_folders.byte_tokenizer()
    data = load_rows(config, tokenizer)
    held = [tokenizer.decode(data.held_out.corpus.ids[a:b]) for a, b in data.held_out.spans]
    trained = [tokenizer.decode(data.train.corpus.ids[a:b]) for a, b in data.train.spans]
    assert 5 <= len(held) < len(held) + len(trained) == 20
    ids = held_out_tokens(config, tokenizer)
    assert tokenizer.decode(ids) == "".join(held)
    args = ["perplexity", root / "model", "--adapter", root / "adapter", "--json", "--length", 60]
    got = json.loads(cli(*args, "--data", tmp_path / "docs.jsonl", "--held-out", 0.3))
    pruned = kvprune.load(root / "model", root / "adapter")
    want = [row.to_dict() for row in perplexity(pruned, ids, length=60, dense="open")]
    assert got["rows"] == want
    # the same by the recipe in the folder of a run
    recipe = make_recipe({"model": "m", "data": {"sources": config.sources, "length": 60,
                                                 "held_out": 0.3}})  # fmt: skip
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text(to_yaml(recipe))
    assert json.loads(cli(*args, "--held-out", tmp_path / "run"))["rows"] == want
    for wrong in ([], ["--held-out", 0.3],
                  ["--held-out", tmp_path / "run", "--data", "x.txt"]):  # fmt: skip
        with pytest.raises(PruneError, match="pass a text with --data, or the folder of a run"):
            cli(*args, *wrong)
    with pytest.raises(PruneError, match=r"neither a number .* nor the folder or recipe"):
        cli(*args, "--held-out", tmp_path / "nowhere")


def test_perplexity_saves_numbers_and_figures_and_resumes(root, tmp_path):
    args = ["perplexity", root / "whole", "--data", root / "text.txt.gz", "--out", tmp_path / "o",
            "--length", 100, "--max-windows", 3, "--batch", 1, "--json"]  # fmt: skip
    first = json.loads(cli(*args))
    kept = {file.name: file.read_bytes() for file in (tmp_path / "o").iterdir()}
    assert sorted(kept) == [f"perplexity.{end}" for end in ("json", "png", "points.json", "svg")]
    assert json.loads(kept["perplexity.json"]) == first
    assert kept["perplexity.png"].startswith(b"\x89PNG")
    assert b"context, tokens" in kept["perplexity.svg"]
    assert json.loads(cli(*args)) == first
    assert {file.name: file.read_bytes() for file in (tmp_path / "o").iterdir()} == kept
    # points in the file are not measured again: edited numbers come back
    points = json.loads(kept["perplexity.points.json"])
    for point in points["points"]:
        point["rows"][0]["loss"][-1] = 0.0
    (tmp_path / "o/perplexity.points.json").write_text(json.dumps(points))
    assert json.loads(cli(*args))["rows"][-1]["perplexity"] == 1.0
    with pytest.raises(PruneError, match=r"measured with length = 100, now it is 50"):
        cli(*args, "--length", 50)
    # more windows: the first three are not read again
    more = json.loads(cli(*args, "--max-windows", 4))["rows"][-1]
    fourth = json.loads((tmp_path / "o/perplexity.points.json").read_text())["points"][-1]["rows"]
    assert more["loss"] == pytest.approx(fourth[0]["loss"][-1] / 400)


def test_rows_of_different_weights_do_not_mix(root, tmp_path):
    adapter = tmp_path / "adapter"
    args = ["perplexity", root / "model", "--adapter", adapter, "--data", root / "text.txt.gz",
            "--length", 50, "--max-windows", 1, "--out", tmp_path / "o"]  # fmt: skip
    pruned = kvprune.load(root / "model", root / "adapter")
    pruned.save(adapter)
    cli(*args)
    pruned.interactions[0].beta.data.add_(0.1)
    pruned.save(adapter)
    with pytest.raises(PruneError, match="measured with weights = "):
        cli(*args)


def test_a_full_model_is_compared_with_its_base(root):
    args = ["--data", root / "text.txt.gz", "--length", 100, "--max-windows", 2, "--json"]
    full = json.loads(cli("perplexity", root / "whole", *args))["rows"]
    dense = json.loads(cli("perplexity", root / "model", *args))["rows"]
    for row, other in zip(full, dense, strict=True):
        assert row["dense_perplexity"] == pytest.approx(other["perplexity"], rel=1e-6)
    itself = json.loads(cli("perplexity", root / "whole", "--dense-model", root / "whole", *args))
    assert itself["rows"][-1]["dense_perplexity"] != pytest.approx(full[-1]["dense_perplexity"])
    alone = json.loads(cli("perplexity", root / "adapter", *args))["rows"]  # knows its base
    assert alone[-1]["dense_perplexity"] == pytest.approx(dense[-1]["perplexity"], rel=1e-5)
    assert alone[-1]["perplexity"] != pytest.approx(full[-1]["perplexity"])


def test_perplexity_for_people(root):
    out = cli("perplexity", root / "adapter", "--data", root / "text.txt.gz", "--length", 64)
    for word in ("context", "perplexity", "pruned", "dense", "KL", "all"):
        assert word in out


def test_bad_input_is_one_clear_line(root, tmp_path, monkeypatch):
    text = root / "text.txt.gz"

    def fails(match, *args):
        with pytest.raises(PruneError, match=match):
            cli("perplexity", *args)

    fails("nowhere.txt does not exist", root / "model", "--data", tmp_path / "nowhere.txt")
    short = tmp_path / "short.txt"
    short.write_text("so short")
    fails(r"short.txt has 9 tokens, fewer than the 50 of one window; lower --length",
          root / "model", "--data", short, "--length", 50)  # fmt: skip
    fails("windows of 201 tokens do not fit into the 200 positions", root / "model",
          "--data", text, "--length", 201)  # fmt: skip
    fails(
        "--contexts '64;128' must be whole numbers",
        root / "model",
        "--data",
        text,
        "--contexts",
        "64;128",
    )
    fails("path='quick' is unknown", root / "model", "--data", text, "--path", "quick")
    fails("cannot load the model", tmp_path / "none", "--data", text)
    fails("does not exist", root / "model", "--adapter", tmp_path, "--data", text)
    fails("cannot put the model on 'nowhere'", root / "model", "--data", text, "--device",
          "nowhere")  # fmt: skip
    fails("gone': this folder does not exist", root / "whole", "--data", text,
          "--dense-model", tmp_path / "gone")  # fmt: skip
    loaded = replace(load_with_tokenizer(str(root / "whole")), base=str(tmp_path / "gone"))
    with pytest.raises(PruneError, match="name another with --dense-model, or use --no-dense"):
        dense_reference(loaded)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    fails("figures need the package matplotlib; pip install", root / "model", "--data", text,
          "--out", tmp_path / "o")  # fmt: skip
