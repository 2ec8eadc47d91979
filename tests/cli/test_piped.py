"""Piped text is a prompt without the newline that a shell adds."""

import json

import pytest
from typer.testing import CliRunner

import model_folders
from kvprune.chat import completion
from kvprune.cli import app

CASES = [("One two", "One two"), ("One two\n", "One two"), ("One\n\n", "One\n"), ("a\r\n", "a")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return model_folders.save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("text", "want"), CASES)
def test_generate(place, monkeypatch, text, want):
    prompts = []

    def complete(model, tokenizer, given, *args, **options):
        prompts.extend(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(completion, "complete", complete)
    for dash in ([], ["-"]):
        CliRunner().invoke(app, ["generate", str(place / "model"), *dash], input=text)
    assert prompts == [want, want]


def test_explain(place, tmp_path):
    for text, want in CASES[:3]:
        arguments = ["explain", place / "adapter", "--out", tmp_path / "page.html", "--json"]
        done = CliRunner().invoke(app, [str(argument) for argument in arguments], input=text)
        assert json.loads(done.stdout)["tokens"] == len(want)
