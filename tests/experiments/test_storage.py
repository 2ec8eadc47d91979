"""What narrow caches cost, at toy size on the package's small model."""

import gzip
import json
import shutil
import sys

import pytest
import torch

import kvprune
from experiments.smollm2 import needle, storage, storage_needle
from experiments.smollm2.storage import FORMS, REFERENCE, WHOLE, Form
from helpers import uneven_gates
from kvprune import PrunedCache, tiny
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.cache import extents
from kvprune.errors import PruneError
from kvprune.ops.never import NEVER
from kvprune.text.windows import cut

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The small model with a chat template, an adapter, and a text."""
    path = tmp_path_factory.mktemp("storage")
    shutil.copytree(tiny.FOLDER, path / "model", ignore=shutil.ignore_patterns("*.gz", "*.py"))
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    model = load_base(path / "model", "float32")
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned, spread=3.0)
    pruned.save(path / "strong")
    book = gzip.decompress(tiny.text_file("held_out").read_bytes()).decode()
    (path / "book.txt").write_text(book[5_000:30_000])
    return path


def run(module, monkeypatch, folder, *args) -> list[dict]:
    given = [
        folder / "model",
        folder / "strong",
        "--runs",
        folder / "runs",
        "--docs",
        folder / "docs",
    ]
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, [*given, *args])])
    module.main()
    name = f"smollm2_{module.__name__.rpartition('.')[-1]}.json"
    return json.loads((folder / "docs" / "results" / name).read_text())["rows"]


def test_every_form_is_compared_once(folder, monkeypatch, capsys):
    args = ["--book", folder / "book.txt", "--length", 96, "--chunk", 8, "--few", 384]
    rows = run(storage, monkeypatch, folder, *args, "--tokens", 768)
    assert [Form(row["kv"], row["key_int"], row["rotate"]) for row in rows] == [*FORMS]
    for form, row in zip(FORMS, rows, strict=True):
        assert row["tokens"] == (768 if form == WHOLE else 384)
        assert row["ratio"] == pytest.approx(1, abs=0.01)
        # votes alone are rarely changed in so small a model
        assert 0 <= row["kl"] < 0.01
        assert row["kl"] > 1e-6 or form.kv is None
    half, _, byte, *_ = (row["moved"] for row in rows)
    assert half < byte < 0.05
    assert "| strong | int8, no rotation, interaction keys float16 |" in capsys.readouterr().out
    monkeypatch.setattr(storage, "compare", lambda *_: pytest.fail("measured again"))
    assert run(storage, monkeypatch, folder, *args, "--tokens", 768) == rows
    with pytest.raises(PruneError, match="choose multiples of 384"):
        run(storage, monkeypatch, folder, *args, "--tokens", 200)


def test_only_the_form_of_int8_is_decoded(folder, monkeypatch):
    args = ["--length", 12, "--chunk", 1, "--tokens", 24, "--few", 0, "--at-once", 2]
    (row,) = run(storage, monkeypatch, folder, "--book", folder / "book.txt", *args)
    assert (row["tokens"], row["kv"], row["key_int"], row["rotate"]) == (24, *WHOLE)
    assert row["kl"] > 1e-6


def test_the_comparison_against_whole_readings(folder, monkeypatch):
    pruned = kvprune.load(load_base(folder / "model", "float32"), folder / "strong")
    torch.manual_seed(1)
    windows = cut(torch.randint(pruned.model.config.vocab_size, (2 * 40 + 1,)), 40)
    forms = [Form("int8", "int8", rotate=rotate) for rotate in (True, False)]
    with torch.inference_mode(), pruned.evaluating():
        rows = storage.compare(pruned, windows, forms, 8)
        found = []
        for form in (REFERENCE, *forms):
            if not form.rotate:
                monkeypatch.setattr(extents, "hadamard", lambda *_: None)
            cache = PrunedCache(pruned, record=True, kv=form.kv, key_int=form.key_int)
            parts = [storage.step(pruned, cache, part) for part in windows.ids.split(8, 1)]
            found.append((torch.cat(parts, 1).log_softmax(-1), cache.drop_step))
    log_q, plain = found[0]
    for form, (log_p, drop_step) in zip(forms, found[1:], strict=True):
        (row,) = rows[form]
        loss = -log_p.gather(-1, windows.targets[..., None]).sum()
        assert row["loss"] == pytest.approx(float(loss), rel=1e-6)
        assert row["kl"] == pytest.approx(float((log_q.exp() * (log_q - log_p)).sum()), rel=1e-4)
        assert row["tokens"] == 80
        assert row["moved"] == int((plain != drop_step).sum())
    assert rows[forms[0]] != rows[forms[1]]


def test_needles_are_asked_in_both_forms(folder, monkeypatch, capsys):
    monkeypatch.setattr(needle, "WRONG", 3)
    monkeypatch.setattr(storage_needle, "CHUNK", 40)
    args = ["--text", folder / "book.txt", "--contexts", "160", "--depths", "0.2,0.8"]
    (row,) = run(storage_needle, monkeypatch, folder, *args, "--seeds", 1)
    assert (row["prompts"], row["context"]) == (2, 160)
    assert 0 < row["log_p_apart"] < 0.5
    assert row["log_p"] != row["log_p_int8"] == pytest.approx(row["log_p"], abs=0.5)
    assert "| strong | 160 | 2 |" in capsys.readouterr().out


def test_a_prompt_in_chunks_scores_as_one_that_is_read_at_once(folder, monkeypatch):
    monkeypatch.setattr(needle, "WRONG", 3)
    tokenizer = load_tokenizer(folder / "model")
    filler = tokenizer((folder / "book.txt").read_text(), verbose=False).input_ids
    prompts = [needle.make_prompt(tokenizer, filler, 150, 0.5, seed) for seed in range(2)]
    pruned = kvprune.load(load_base(folder / "model", "float32"), folder / "strong")
    with torch.inference_mode(), pruned.evaluating():
        whole = needle.ask(pruned, tokenizer, prompts)
        parts = needle.ask(pruned, tokenizer, prompts, 40)
    for a, b in zip(whole, parts, strict=True):
        assert a == pytest.approx(b, abs=1e-3)


def test_votes_are_counted_as_by_loops():
    torch.manual_seed(0)
    L, B, T = 2, 3, 12
    steps = [torch.randint(1, 9, (L, B, T)) + torch.arange(T) for _ in range(2)]
    reference, form = (step.where(step < T, NEVER) for step in steps)
    form = form.where(torch.rand(L, B, T) < 0.3, reference)
    votes = flipped = 0
    for a, b in zip(reference.view(-1, T).tolist(), form.view(-1, T).tolist(), strict=True):
        for j in range(T):
            for k in range(j + 1, T):
                votes += a[j] > k
                flipped += (a[j] > k) != (b[j] > k)
    counted = storage.by_votes(reference, form)
    assert (counted["votes"], counted["flipped"]) == (votes, flipped)
    assert counted["decisions"] == L * B * T
    held = [
        ({j for j in range(T) if a[j] == NEVER}, {j for j in range(T) if b[j] == NEVER})
        for a, b in zip(reference.view(-1, T).tolist(), form.view(-1, T).tolist(), strict=True)
    ]
    assert counted["sets_unlike"] == sum(a != b for a, b in held)
    assert counted["held_unlike"] == sum(len(a ^ b) for a, b in held) > 0
    assert counted["held"] == sum(len(a) for a, _ in held)
