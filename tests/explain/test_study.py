"""A study of a corpus, its figures, and the command."""

import json
import xml.etree.ElementTree as ET

import pytest
from typer.testing import CliRunner

import traces as made
from kvprune import PruneError
from kvprune.cli import app
from kvprune.explain import Trace, figures
from kvprune.explain.study import read_rows, study

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
    """A saved model of a few layers that drops, with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    pruned = made.pruned_model()
    pruned.save(folder)
    interactions = pruned.detach()
    interactions.save_pretrained(folder)
    made.tokenizer().save_pretrained(folder)
    return folder


def run(*args, text=""):
    return CliRunner().invoke(app, ["explain", *args], input=text)


def test_rows_come_from_the_sources_in_turn(corpus):
    tok = made.tokenizer()
    rows = list(read_rows([str(corpus / "a.txt"), str(corpus / "b.txt")], tok, 50))
    texts = [tok.decode(row) for row in rows]
    assert {len(row) for row in rows} == {50}
    assert "book a" in texts[0]
    assert "book b" in texts[1]
    whole = (corpus / "a.txt").read_text()
    assert whole.startswith("".join(texts[0::2])[:400])
    with pytest.raises(PruneError, match="2 or more"):
        next(read_rows([str(corpus)], tok, 1))


def test_study_and_figures(corpus, tmp_path):
    pruned, tok = made.pruned_model(), made.tokenizer()
    made_study = study(pruned, tok, [str(corpus)], length=80, rows=3, texts=TEXTS)
    rows = list(read_rows([str(corpus)], tok, 80))[:3]
    drops = sum((Trace.from_ids(pruned, tok, row).drop_step < 80).sum() for row in rows)
    assert sum(made_study.statistics.drops_by_layer) == drops > 0
    assert made_study.statistics.texts == 3
    assert made_study.switch.expected is not None
    files = figures.save(made_study, tmp_path)
    assert len(files) == 7
    for file in files:
        assert ET.parse(file).getroot().tag.endswith("svg")
    again = figures.save(made_study, tmp_path / "again")
    assert [f.read_bytes() for f in files] == [f.read_bytes() for f in again]
    saved = json.loads(made_study.save(tmp_path / "s.json").read_text())
    assert saved == made_study.to_plain()
    short = study(pruned, tok, [str(corpus)], length=10, rows=3, texts=TEXTS)
    assert short.switch.expected is None
    with pytest.raises(PruneError, match="lower the length"):
        study(pruned, tok, [str(corpus)], length=500_000)


def test_command_writes_the_page(model, tmp_path):
    page, trace, svg = tmp_path / "p.html", tmp_path / "t.npz", tmp_path / "a.svg"
    done = run(str(model), "-", "--write", "9", "--out", str(page), "--save", str(trace),
               "--animate", str(svg), "--title", "A <test>", "--json", text=made.TEXT)  # fmt: skip
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    kept = Trace.load(trace)
    assert kept.text.startswith(made.TEXT)
    assert len(kept.tokens) == kept.prompt + 9 == said["tokens"]
    assert said["sparsity_by_layer"] == kept.sparsity[:, -1].tolist()
    assert said["page"] == str(page)
    assert "<title>A &lt;test&gt;</title>" in page.read_text()
    assert ET.parse(svg).getroot() is not None
    data = json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])
    assert Trace.from_dict({k: data[k] for k in kept.to_dict()}).to_dict() == kept.to_dict()


def test_command_counts_a_corpus(model, corpus, tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_text(text)
    done = run(str(model), "--corpus", str(corpus), "--rows", "2", "--length", "64",
               "--figures", str(tmp_path / "out"), "--switch", str(tmp_path / "0.txt"),
               "--switch", str(tmp_path / "1.txt"))  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "punctuation" in done.stderr
    numbers = json.loads((tmp_path / "out" / "forgetting.json").read_text())
    assert numbers["about"]["rows"] == 2
    assert len(numbers["switch"]["starts"]) == 2
    assert len(done.stdout.split()) == 8


def test_command_refuses_clearly(model, tmp_path):
    done = run(str(model), "", "--out", str(tmp_path / "p.html"))
    assert isinstance(done.exception, PruneError)
    assert "the text is empty" in str(done.exception)
    assert not (tmp_path / "p.html").exists()
