"""The study of misses at toy size, and its shares against plain sums."""

import json
import sys

import numpy as np
import pytest
import torch

import kvprune
import traces
from experiments.smollm2 import misses, misses_report
from helpers import uneven_gates
from kvprune import tiny
from kvprune.adapters import lora
from kvprune.adapters.pretrained import load_base
from kvprune.errors import PruneError
from kvprune.explain import Trace

STORY = "The old man went to the sea. The old man saw a ship, and the ship saw the old man. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An adapter with LoRA for the small model, and two files of articles."""
    path = tmp_path_factory.mktemp("misses")
    model = load_base(tiny.NAME, "float32")
    torch.manual_seed(0)
    lora.add(model, 2, 4.0)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    pruned.save(path / "strong")
    long = [f"Title {i}\n\n" + STORY * (3 + i) for i in range(2)]
    (path / "articles.txt").write_text("\n\n\n".join(["Too short", *long]))
    return path


def run(monkeypatch, folder, *args) -> dict:
    text = folder / "articles.txt"
    files = ["--runs", folder / "runs", "--docs", folder / "docs"]
    given = [tiny.NAME, folder / "strong", "--wikitext", text, "--news", text, "--tokens", 60]
    monkeypatch.setattr(sys, "argv", ["misses", *map(str, [*given, *files, *args])])
    misses.main()
    return json.loads((folder / "docs" / "results" / "smollm2_misses.json").read_text())


def test_the_study_from_texts_to_rows_and_figure(folder, monkeypatch, capsys):
    found = run(monkeypatch, folder, "--articles", 2)
    assert (found["about"]["adapter"], found["about"]["tokens"]) == ("strong", 60)
    articles = misses_report.by_article(found["rows"])
    assert len(articles) == 4
    # the same articles in both files
    assert articles[0][0]["title"] == articles[2][0]["title"] == "Title 0"
    pruned = kvprune.load(tiny.NAME, folder / "strong")
    tok = traces.tokenizer()
    text = (folder / "articles.txt").read_text().split("\n\n\n")[1].strip()
    trace = Trace.from_ids(pruned, tok, tok(text).input_ids[:60]).with_misses(10)
    article, *missed = articles[0]
    for place, name in enumerate(("dense", "open"), 1):
        cost = (trace.loss - getattr(trace, f"{name}_loss"))[1:].astype(float)
        measured = article["cost"][name]
        assert article["loss"] - article[f"{name}_loss"] == pytest.approx(cost.sum(), abs=1e-3)
        assert measured["net"] == pytest.approx(cost.sum(), abs=1e-3)
        assert measured["suffered"] == pytest.approx(sum(cost[cost > 0]), abs=1e-3)
        assert measured["worst"][misses_report.COUNTS.index(3)] == pytest.approx(
            sum(sorted(cost, reverse=True)[:3]), abs=1e-3
        )
        assert measured["best"][0] == pytest.approx(min(cost), abs=1e-3)
        for classes in ("kinds", "speeches", "repeats"):
            counts = article[classes].values()
            assert sum(own[0] for own in counts) == 59
            assert sum(own[place] for own in counts) == pytest.approx(cost.sum(), abs=1e-3)
    assert [row["token"] for row in missed] == [miss.token for miss in trace.misses]
    for row in missed:
        for name in ("one_layer", "all_layers", "random"):
            if name in row:
                layer = row[name]["layer"]
                want = trace.restore(row[name]["token"], layer)[row["token"]]
                assert row[name]["loss"] == pytest.approx(want, abs=1e-3)
                assert row[name]["distance"] == row["token"] - row[name]["token"]
    assert any("three" in row for row in missed)
    assert (folder / "docs" / "figures" / "smollm2_misses.svg").exists()
    # nothing is measured twice
    monkeypatch.setattr(misses, "study", lambda *args: pytest.fail("measured again"))
    assert run(monkeypatch, folder, "--articles", 2)["rows"] == found["rows"]
    with pytest.raises(PruneError, match="2 articles have 60 tokens, 3 are needed"):
        run(monkeypatch, folder, "--articles", 3)


def test_repeated_n_grams():
    ids = [5, 6, 7, 5, 6, 8, 9, 5, 6, 7]
    assert [misses.repeated(ids, token) for token in range(10)] == [0, 0, 0, 1, 2, 0, 0, 1, 2, 3]


def test_shares_and_intervals_against_loops():
    rng = np.random.default_rng(0)
    articles = []
    for number in range(6):
        missed = [
            {"loss": a + 2, "dense_loss": 1.0, "open_loss": 1.5, "kind": kind, "repeated": n,
             **({"three": {"loss": a}} if n else {})}
            for a, kind, n in zip(rng.random(3), ["word", "number", "word"], [0, 2, 5], strict=True)
        ]  # fmt: skip
        article = {
            "cost": {
                "open": {"net": 10.0 + number, "suffered": 15.0, "worst": list(range(9))},
                "dense": {"net": 12.0, "suffered": 15.0, "worst": list(range(9))},
            },
            "kinds": {"word": [7, 3.0, 0.0], "number": [1 + number, -1.0, 1.0]},
        }  # fmt: skip
        articles.append([article, *missed])

    def interval(share):
        return misses_report.interval(articles, share)

    costs = sum(10.0 + number for number in range(6))
    assert interval(misses_report.explained(10))[0] == pytest.approx(6 * 4 / costs)
    assert interval(misses_report.explained(10, of="suffered"))[0] == pytest.approx(4 / 15)
    assert interval(misses_report.explained(10, against="dense"))[0] == pytest.approx(4 / 12)
    gain = sum(row["loss"] - row["three"]["loss"] for a in articles for row in a[1:]
               if "three" in row)  # fmt: skip
    cost = sum(row["loss"] - 1.0 for a in articles for row in a[1:])
    # a token for which nothing was brought back gains nothing
    assert interval(misses_report.recovered("three"))[0] == pytest.approx(gain / cost)
    gone = sum(row["loss"] - 1.5 for a in articles for row in a[1:])
    assert interval(misses_report.recovered("open"))[0] == pytest.approx(gone / cost)
    assert interval(misses_report.among_misses("kind", "word"))[0] == pytest.approx(2 / 3)
    assert interval(misses_report.among_misses("repeated", *range(2, 9)))[0] == pytest.approx(2 / 3)
    found = interval(misses_report.among_all("kinds", ["number"], 0))
    assert found[0] == pytest.approx(21 / (21 + 42))
    assert found[1] < found[0] < found[2]
    assert interval(misses_report.among_all("kinds", ["number"], 1))[0] == pytest.approx(-0.5)
    # one article has no spread
    assert len({*misses_report.interval(articles[:1], misses_report.explained(1))}) == 1
