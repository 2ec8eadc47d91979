"""The study of a corpus, its figures, and the explain command."""

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from typer.testing import CliRunner

import kvprune
import traces
from kvprune import PruneError
from kvprune.cli import app
from kvprune.explain import Trace, figures
from kvprune.explain.corpus_study import read_rows, study_corpus
from kvprune.explain.page.packing import unpack

TEXTS = ("One cat sat. " * 4, "Two dogs ran; " * 3)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for name in "ab":
        text = f"In book {name} the cat sat on the mat, and then it slept. Nobody said why.\n" * 30
        (folder / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A saved model of a few layers that drops tokens, with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    pruned = traces.pruned_model()
    pruned.save(folder)
    pruned.detach().save_pretrained(folder)
    traces.tokenizer().save_pretrained(folder)
    return folder


def run_explain(*args, text=""):
    return CliRunner().invoke(app, ["explain", *args], input=text)


def test_rows_alternate_between_sources(corpus):
    tok = traces.tokenizer()
    rows = list(read_rows([str(corpus / "a.txt"), str(corpus / "b.txt")], tok, 50))
    texts = [tok.decode(row) for row in rows]
    assert {len(row) for row in rows} == {50}
    assert "book a" in texts[0]
    assert "book b" in texts[1]
    document = (corpus / "a.txt").read_text()
    assert document.startswith("".join(texts[0::2])[:400])
    with pytest.raises(PruneError, match="2 or more"):
        next(read_rows([str(corpus)], tok, 1))


def test_study_and_figures(corpus, tmp_path):
    pruned, tok = traces.pruned_model(), traces.tokenizer()
    study = study_corpus(pruned, tok, [str(corpus)], length=80, rows=3, texts=TEXTS)
    rows = list(read_rows([str(corpus)], tok, 80))[:3]
    drops = sum((Trace.from_ids(pruned, tok, row).drop_step < 80).sum() for row in rows)
    assert sum(study.statistics.drops_by_layer) == drops > 0
    assert study.statistics.texts == 3
    assert study.switch.expected is not None
    files = figures.save(study, tmp_path)
    assert len(files) == 7
    for file in files:
        assert ET.parse(file).getroot().tag.endswith("svg")
    again = figures.save(study, tmp_path / "again")
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in again]
    saved = json.loads(study.save(tmp_path / "s.json").read_text())
    assert saved == study.to_plain()
    short = study_corpus(pruned, tok, [str(corpus)], length=10, rows=3, texts=TEXTS)
    assert short.switch.expected is None
    with pytest.raises(PruneError, match="lower the length"):
        study_corpus(pruned, tok, [str(corpus)], length=500_000)


def test_command_writes_the_page(model, tmp_path):
    page, trace, svg = tmp_path / "p.html", tmp_path / "t.npz", tmp_path / "a.svg"
    result = run_explain(
        str(model), "-", "--write", "9", "--out", str(page), "--save", str(trace),
        "--animate", str(svg), "--title", "A <test>", "--json", text=traces.TEXT,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    loaded = Trace.load(trace)
    assert loaded.text.startswith(traces.TEXT)
    assert len(loaded.tokens) == loaded.prompt + 9 == printed["tokens"]
    assert printed["sparsity_by_layer"] == loaded.sparsity[:, -1].tolist()
    assert printed["page"] == str(page)
    assert "<title>A &lt;test&gt;</title>" in page.read_text()
    assert ET.parse(svg).getroot() is not None
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    assert tuple(data["tokens"]) == loaded.tokens
    life = unpack(data["records"][0]["drop"])
    step = np.where(life > 0, np.arange(life.shape[1]) + life, kvprune.NEVER)
    assert np.array_equal(step, loaded.drop_step)


def test_command_studies_a_corpus(model, corpus, tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    result = run_explain(
        str(model), "--corpus", str(corpus), "--rows", "2", "--length", "64",
        "--figures", str(tmp_path / "out"), "--switch", str(tmp_path / "0.txt"),
        "--switch", str(tmp_path / "1.txt"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "punctuation" in result.stderr
    numbers = json.loads((tmp_path / "out" / "forgetting.json").read_text())
    assert numbers["about"]["rows"] == 2
    assert len(numbers["switch"]["starts"]) == 2
    assert len(result.stdout.split()) == 8


def test_command_refuses_empty_text(model, tmp_path):
    result = run_explain(str(model), "", "--out", str(tmp_path / "p.html"))
    assert isinstance(result.exception, PruneError)
    assert "the text is empty" in str(result.exception)
    assert not (tmp_path / "p.html").exists()
