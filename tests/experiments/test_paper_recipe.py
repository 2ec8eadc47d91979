"""The paper's recipe, a few steps of it on a few pages."""

import gzip
import json
import sys

import pytest

from experiments import paper_recipe, small
from kvprune import tiny


@pytest.fixture
def corpus(tmp_path):
    """The book of the package in a corpus, under the name of one to train on."""
    text = gzip.decompress(tiny.text_file("train").read_bytes()).decode()
    (tmp_path / "corpus").mkdir()
    with gzip.open(tmp_path / "corpus/books-x.jsonl.gz", "wt") as out:
        out.write(json.dumps({"id": "a", "text": text[:60_000]}) + "\n")
        out.write(json.dumps({"id": "pg55_The_Wonderful_Wizard_of_Oz", "text": "Oz"}) + "\n")
    return tmp_path / "corpus"


def test_each_run_is_trained_once_and_measured(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(small, "LENGTH", 64)
    monkeypatch.setattr(small, "by_context", lambda pruned: [(64, 0.5, 30.0)])
    trained = []
    run = paper_recipe.run

    def watched(recipe, folder, *args, **kwargs):
        trained.append(folder.name)
        settings = recipe.train
        assert (settings.max_grad_norm, settings.alpha_end, settings.lr_schedule) == (
            0, 8.0, "constant",
        )  # fmt: skip
        return run(recipe, folder, *args, **kwargs)

    monkeypatch.setattr(paper_recipe, "run", watched)
    (tmp_path / "results").mkdir()
    arguments = [
        "paper_recipe", "--corpus", str(corpus), "--steps", "2", "--seeds", "1", "--only", "dense",
        "gamma-0.3", "distilled", "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    paper_recipe.main()
    paper_recipe.main()
    assert trained == ["dense-2-0", "gamma-0.3-2-0", "distilled-2-0"]
    rows = json.loads((tmp_path / "results/paper_recipe.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["dense", "gamma-0.3", "distilled"]
    assert "Oz" not in (tmp_path / "runs/books.jsonl").read_text()


def test_our_changes_are_made_one_at_a_time():
    base = paper_recipe.RUNS["gamma-0.3"]
    for name in ("spread", "alpha-1.5", "distilled", "protect-16", "interaction-lr"):
        method, changes = paper_recipe.RUNS[name]
        both = {**paper_recipe.PAPER, **changes, **method}
        plain = {**paper_recipe.PAPER, **base[1], **base[0]}
        assert sum(both[key] != plain.get(key) for key in both) == 1, name
