"""The experiments on SmolLM2, at toy size on the package's small model."""

import argparse
import gzip
import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml

import fake_registry
import kvprune
from experiments.smollm2 import (
    average,
    chats,
    common,
    forgets,
    needle,
    quality,
    shrink,
    size,
    speed,
    text,
    tuning,
    zeroshot,
)
from experiments.smollm2 import train as strengths
from helpers import uneven_gates
from kvprune import tiny
from kvprune.adapters import lora, registry
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.adapters.registry import About
from kvprune.errors import PruneError
from kvprune.train import recipe, spread
from kvprune.train.run import run as train

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The small model with a chat template, an adapter with LoRA, and a text."""
    path = tmp_path_factory.mktemp("smollm2")
    shutil.copytree(tiny.FOLDER, path / "model", ignore=shutil.ignore_patterns("*.gz", "*.py"))
    (path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    model = load_base(path / "model", "float32")
    torch.manual_seed(0)
    lora.add(model, 2, 4.0)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned, spread=0.6)
    spread.scale(pruned, spread.factors(pruned))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    pruned.save(path / "strong")
    book = gzip.decompress(tiny.text_file("held_out").read_bytes()).decode()
    (path / "book.txt").write_text(book[5_000:60_000])
    return path


def run(module, monkeypatch, *args) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, args)])
    module.main()


def rows_of(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / "results" / f"{name}.json").read_text())["rows"]


# ---- the text


def sentences(words: str, seed: int, count: int) -> str:
    """One paragraph each, about a person of its own."""
    rng = random.Random(seed)
    lines = []
    for _ in range(count):
        chosen = " ".join(rng.choices([f"{words}{i}" for i in range(200)], k=rng.randint(8, 20)))
        name = "".join(rng.choices("aeiorstmnl", k=8)).capitalize()
        lines.append(f"It was {chosen} and then {name} left.")
    return "\n\n".join(lines)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")

    def write(name: str, documents: dict[str, str]) -> None:
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as out:
            for key, content in documents.items():
                out.write(json.dumps({"id": f"{name}/{key}", "text": content}) + "\n")

    secret = sentences("secret", 99, 60)
    (folder / "test.txt").write_text(f"A test article\n\n{secret}")
    write("books-a", {f"book{i}": f"Book {i}\n\n" + sentences(f"b{i}x", i, 150) for i in range(8)})
    articles = {f"art{i}": f"Title {i}\n\n" + sentences(f"e{i}x", 20 + i, 50) for i in range(12)}
    write(
        "encyclopedic-b",
        {**articles, **dict.fromkeys(("leak", "copy", "twin", "again"), f"Leaked\n\n{secret}")},
    )
    news = {f"news{i}": f"Report {i}\n\n" + sentences(f"n{i}x", 50 + i, 30) for i in range(12)}
    write("encyclopedic-wikinews", news)
    return folder


def test_the_text_is_a_mix_without_held_out_documents(corpus, root, tmp_path, monkeypatch, capsys):
    # sizes for a small corpus
    for name, value in {"SHORT": 2_000, "LONG": 5_000, "BOOK": (9_000, 90_000), "NEWS": 5_000,
                        "LEAST_TOKENS": 300}.items():  # fmt: skip
        monkeypatch.setattr(text, name, value)
    args = [root / "model", "--corpus", corpus, "--wikitext", corpus / "test.txt"]
    for out in ("one", "two"):
        run(text, monkeypatch, *args, "--tokens", 200_000, "--out", tmp_path / out)
    train_text = (tmp_path / "one" / "train.jsonl").read_text()
    assert train_text == (tmp_path / "two" / "train.jsonl").read_text()
    rows = [json.loads(line) for line in train_text.splitlines()]
    assert {row["kind"] for row in rows} == set(text.SHARES)
    about = json.loads((tmp_path / "one" / "about.json").read_text())
    ids = " ".join(row["id"] for row in rows)
    held = [about["held_out_book"], *about["held_out_news"]]
    assert all(f"{name} " not in f"{ids} " for name in held)
    assert "secret1" not in train_text
    assert about["encyclopedic_left_out"] + about["chat_left_out"] >= 1
    for name in ("held_out_book.txt", "held_out_news.txt"):
        kept = set(text.grams((tmp_path / "one" / name).read_text()))
        assert len(kept) > 500
        assert not any(kept & set(text.grams(row["text"])) for row in rows)
    dialogues = [row["text"] for row in rows if row["kind"] == "chat"]
    assert all(chat.startswith("<user>") and "<assistant>" in chat for chat in dialogues)
    assert any(chat.count("<user>") > 2 for chat in dialogues)


def test_a_cut_document_loses_nothing(monkeypatch):
    document = text.Document("books", "b", sentences("w", 1, 400))
    parts = list(text.cut(document))
    assert len(parts) > 1
    assert "\n\n".join(part.text for part in parts) == document.text
    assert all(len(part.text) >= text.SHORT for part in parts)
    assert len({part.name for part in parts}) == len(parts)


@pytest.mark.parametrize("form", [chats.about, chats.story, chats.summary, chats.quote])
def test_a_conversation_quotes_the_document(form):
    document = "The title\n\n" + sentences("w", 3, 40)
    turns = form(document, random.Random(0), 3_000)
    assert len(turns) > 1
    joined = " ".join(part for turn in turns for part in turn)
    assert all(answer in document for _, answer in turns)
    assert len(joined) > 1_000 or form is chats.quote
    assert len(chats.messages(turns)) == 2 * len(turns)


def test_the_recipe_trains_an_adapter(root, tmp_path, monkeypatch):
    monkeypatch.setenv("KVPRUNE_CACHE", str(tmp_path / "cache"))
    data = {"sources": [str(root / "book.txt")], "length": 32, "held_out": 2}
    short = {"steps": 2, "warmup": 0, "eval_every": 2, "probe_every": 2}
    over = {"model": str(root / "model"), "data": data, "train": short}
    settings = recipe.read_recipe(
        Path(text.__file__).parents[2] / "recipes" / "smollm2-135m.yaml", over
    )
    assert (settings.train.tune, settings.train.distill, settings.train.spread) == (
        "lora",
        1.0,
        True,
    )
    result = train(settings, tmp_path / "run", report_to=[], save_strategy="no", disable_tqdm=True)
    assert result.steps == 2
    pruned = kvprune.load(load_base(root / "model", "float32"), tmp_path / "run")
    assert pruned.rank == 32
    assert lora.has_lora(pruned.model)


def test_tuning_variants_train_on_the_same_rows(root, tmp_path, monkeypatch):
    monkeypatch.setenv("KVPRUNE_CACHE", str(tmp_path / "cache"))
    settings = yaml.safe_load(tuning.RECIPE.read_text())
    settings["data"] = {"sources": [str(root / "book.txt")], "held_out": 2}
    settings["train"] |= {"log_every": 1, "warmup": 0}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.setattr(tuning, "RECIPE", tmp_path / "recipe.yaml")
    monkeypatch.setattr(tuning, "BASE", str(root / "model"))
    monkeypatch.setattr(tuning, "LAST", 2)
    for name in ("lora-0.0003", "all-3e-05"):
        monkeypatch.delitem(tuning.VARIANTS, name)
    args = ["--runs", tmp_path / "runs", "--docs", tmp_path / "docs", "--length", 32, "--steps"]
    with pytest.raises(PruneError, match=r"--steps is 1; the mean of the last 2 needs that many"):
        run(tuning, monkeypatch, *args, 1)
    run(tuning, monkeypatch, *args, 3)
    rows = rows_of(tmp_path / "docs", "smollm2_tuning")
    assert [row["tune"] for row in rows] == ["interaction", "lora", "all"]
    # before the first update both agree (LoRA draws random numbers before the gates do)
    first = {
        name: strengths.curve(name, tmp_path / "runs" / f"{name}-3x32")[0]["loss_kl"]
        for name in tuning.VARIANTS
    }
    assert first["all-0.0001"] == pytest.approx(first["interaction-0"], rel=1e-3)
    assert len({row["perplexity"] for row in rows}) == len(rows)
    monkeypatch.setattr(tuning, "run", lambda *_: pytest.fail("trained already"))
    run(tuning, monkeypatch, *args, 3, "--only", "lora-0.001")


def test_zeroshot_of_dense_and_adapters_in_one_table(root, tmp_path, monkeypatch, capsys):
    files = tmp_path / "files"
    files.mkdir()
    lines = [f"She {verb} the door. He saw that she had not {verb} the door"
             for verb in ("shut", "closed", "painted")]  # fmt: skip
    (files / "lambada.jsonl").write_text("".join(json.dumps({"text": s}) + "\n" for s in lines))
    args = [root / "model", root / "strong", "--files", files, "--tasks", "lambada",
            "--runs", tmp_path / "runs", "--docs", tmp_path / "docs"]  # fmt: skip
    run(zeroshot, monkeypatch, *args)
    rows = rows_of(tmp_path / "docs", "smollm2_zeroshot")
    assert [(row["method"], row["strength"], row["task"]) for row in rows] == [
        ("dense", None, "lambada"), ("dense", None, "mean"),
        ("ours", "strong", "lambada"), ("ours", "strong", "mean"),
    ]  # fmt: skip
    dense, pruned = rows[0], rows[2]
    assert dense["sparsity"] == 0.0 < pruned["sparsity"]
    assert dense["perplexity"] != pruned["perplexity"]
    cell = f"{pruned['accuracy']:.1%} ({pruned['perplexity']:.1f}), {pruned['sparsity']:.0%}"
    assert f"| strong | {cell} |" in capsys.readouterr().out
    monkeypatch.setattr(
        "kvprune.evaluate.zeroshot.run._score", lambda *_: pytest.fail("measured already")
    )
    run(zeroshot, monkeypatch, *args)


def test_dense_of_our_own_base_is_not_its_default_adapter():
    assert zeroshot.dense("smollm2-135m") == "smollm2-135m-dense"
    assert zeroshot.dense("some/folder") == "some/folder"


def test_an_adapter_must_be_measured_before_it_is_packed(root, tmp_path, monkeypatch):
    monkeypatch.setattr(strengths, "pack", lambda *_: pytest.fail("packed"))
    (tmp_path / "results").mkdir()
    for name, message in (
        (None, r"smollm2_1024.json does not exist; run quality.py with --name smollm2_1024"),
        ("smollm2_1024", r"smollm2.json does not exist; run quality.py with --name smollm2 first"),
        ("smollm2", r"smollm2_1024.json has no row of 70"),
    ):
        if name is not None:
            saved = json.dumps({"about": {"tokens": 64}, "rows": []})
            (tmp_path / "results" / f"{name}.json").write_text(saved)
        with pytest.raises(PruneError, match=message):
            strengths.packed("70", root / "strong", tmp_path)


def test_the_mean_of_adapters(root, tmp_path):
    with kvprune.load(load_base(root / "model", "float32"), root / "strong") as pruned:
        before = {n: p.detach().clone() for n, p in pruned.model.named_parameters()}
        with torch.no_grad():
            for name, parameter in pruned.model.named_parameters():
                if "interaction" in name or "lora_" in name:
                    parameter.mul_(3.0)
        pruned.save(tmp_path / "thrice")
    average.average([root / "strong", root / "strong", tmp_path / "thrice"], tmp_path / "mean")
    with kvprune.load(load_base(root / "model", "float32"), tmp_path / "mean") as pruned:
        for name, parameter in pruned.model.named_parameters():
            factor = 5 / 3 if "interaction" in name or "lora_" in name else 1.0
            torch.testing.assert_close(parameter, factor * before[name])


def test_adapters_of_different_kinds_have_no_mean(root, tmp_path):
    for name, rank in (("narrow", 4), ("wide", 8)):
        config = kvprune.PruningConfig(rank=rank)
        kvprune.attach(load_base(root / "model", "float32"), config).save(tmp_path / name)
    for runs, message in (
        ([root / "model" / "none"], r"none holds no adapter"),
        ([tmp_path / "wide", root / "strong"], r"adapter_model.safetensors does not exist"),
        ([tmp_path / "wide", tmp_path / "narrow"], r"narrow.* differs in shape from .*wide"),
    ):
        with pytest.raises(PruneError, match=message):
            average.average(runs, tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_every_strength_is_trained_resumed_and_packed(tmp_path, monkeypatch):
    adapters = fake_registry.register(monkeypatch, tmp_path)
    (tmp_path / "text.txt").write_text(sentences("w", 3, 200))
    data = {"sources": [str(tmp_path / "text.txt")], "length": 32, "held_out": 2}
    short = {"steps": 2, "warmup": 0, "eval_every": 2, "probe_every": 2, "save_every": 1,
             "log_every": 1, "spread": False}  # fmt: skip
    stages = {
        "first": {"data": data, "train": short},
        "80": {"data": data, "start": "first", "train": short},
        "50": {"data": data, "start": "80", "train": {**short, "gamma": 0.1}},
        "60": {"mean_of": ("80", "50")},
    }
    for name, value in {"BASE": "little", "STAGES": stages, "DEFAULT": "50"}.items():
        monkeypatch.setattr(strengths, name, value)
    rows = [
        {"method": method, "strength": strength, "text": "book", "context": 1024,
         "sparsity": sparsity, "perplexity": perplexity, "kl": 0.01, "match": 0.9}
        for method, strength, sparsity, perplexity in (
            ("dense", None, 0.0, 20.0), ("ours", "80", 0.81, 21.0), ("ours", "50", 0.52, 20.2),
            ("ours", "60", 0.6, 20.4), ("tova", "80", 0.81, 30.0),
        )
    ]  # fmt: skip
    (tmp_path / "docs/results").mkdir(parents=True)
    for file, tokens in (("smollm2", 64), ("smollm2_1024", 1280)):
        saved = json.dumps({"about": {"tokens": tokens}, "rows": rows})
        (tmp_path / f"docs/results/{file}.json").write_text(saved)
    args = ["--runs", tmp_path / "runs", "--docs", tmp_path / "docs"]
    with pytest.raises(PruneError, match=r"starts from .*80, which is not trained yet"):
        run(strengths, monkeypatch, *args, "--only", "50")
    run(strengths, monkeypatch, *args)
    # as if interrupted in the middle
    (tmp_path / "runs/50/kvprune.safetensors").unlink()
    shutil.rmtree(tmp_path / "runs/50/checkpoint-2")
    run(strengths, monkeypatch, *args, "--pack")
    curves = rows_of(tmp_path / "docs", "smollm2_training")
    assert [(row["strength"], row["step"]) for row in curves] == [
        (strength, step) for strength in ("first", "80", "50") for step in (1, 2)
    ]
    strong, mean, mild = registry.entries()[::-1]
    assert (strong.name, mean.name, mild.name) == ("little-80", "little-60", "little-50")
    assert mild.about == About("little", "wheel", 0.5, 0.52, 1.01, True)
    assert strong.about == About("little", "wheel", 0.8, 0.81, 1.05, False)
    card = (adapters / "little-80/README.md").read_text()
    assert "81.0% of 1,024 tokens pruned\nfor +5.0% of perplexity" in card
    assert "1,280 tokens of each" in card
    assert "| a book (Babbitt) | 1,024 | 81.0% | 20.00 | 21.00 (+5.0%) | 0.010 | 90.0% |" in card
    assert str(tmp_path) not in card
    assert "gamma: 0.3" in card
    assert "mean_of:\n- '80'\n- '50'\n" in (mean.folder / "README.md").read_text()
    monkeypatch.setattr(strengths, "run", lambda *_: pytest.fail("trained already"))
    run(strengths, monkeypatch, *args)


# ---- the measurements


def test_quality_compares_the_same_tokens_and_resumes(root, tmp_path, monkeypatch, capsys):
    args = [root / "model", root / "strong", "--book", root / "book.txt", "--contexts", "32,64",
            "--tokens", 64, "--runs", tmp_path / "runs", "--docs", tmp_path / "docs"]  # fmt: skip
    run(quality, monkeypatch, *args)
    rows = rows_of(tmp_path / "docs", "smollm2")
    assert [row["method"] for row in rows] == [*common.METHODS] * 2
    assert list(rows[0]) == [*quality.COLUMNS]
    for row in rows:
        # SnapKV also sees the part that it reads, much of windows as short as these
        least = 0.03 if row["method"] == "snapkv" else 0.05
        assert (row["sparsity"] > least) == (row["method"] != "dense"), row
        assert (row["kl"] > 1e-5) == (row["method"] != "dense"), row
    learned = {row["context"]: row["sparsity"] for row in rows if row["method"] == "ours"}
    for row in rows[2:]:
        if row["method"] in common.POLICIES:
            # to one token of the context; SnapKV sees all of the part that it reads
            tokens = 1.6 + (row["method"] == "snapkv") * (quality.part_of(row["context"]) - 1)
            assert abs(row["sparsity"] - learned[row["context"]]) <= tokens / (row["context"] - 1)
    assert (tmp_path / "docs/figures/smollm2.svg").exists()
    assert "| book | 64 | tova | strong |" in capsys.readouterr().out

    def again(*_, **__):
        raise AssertionError("measured already")

    monkeypatch.setattr(quality, "perplexity", again)
    run(quality, monkeypatch, *args)
    assert rows_of(tmp_path / "docs", "smollm2") == rows
    run(quality, monkeypatch, *args, "--methods", "dense,ours", "--name", "few")
    assert rows_of(tmp_path / "docs", "few") == [
        row for row in rows if row["method"] not in common.POLICIES
    ]
    assert not (tmp_path / "docs/figures/few.svg").exists()


def test_policies_are_measured_at_chosen_contexts():
    options = {"methods": "dense,ours,tova", "contexts": "256,1024"}
    at_1024 = argparse.Namespace(**options, policies_at="1024")
    assert common.chosen_at(at_1024, 256) == ["dense", "ours"]
    assert common.chosen_at(at_1024, 1024) == ["dense", "ours", "tova"]
    everywhere = argparse.Namespace(**options, policies_at=None)
    assert common.chosen_at(everywhere, 256) == ["dense", "ours", "tova"]


def test_windows_of_any_length_predict_the_same_tokens():
    ids = torch.arange(1000)
    for context in (8, 32, 64):
        windows = quality.halves(ids, context, 64, 128)
        counted = windows.targets[:, windows.first :].flatten()
        assert counted.tolist() == list(range(33, 33 + 128))
    with pytest.raises(PruneError, match="multiple of 32 as --tokens"):
        quality.halves(ids, 8, 64, 100)


def test_needle_scores_agree_with_a_full_pass(root, monkeypatch):
    tokenizer = load_tokenizer(root / "model")
    filler = tokenizer((root / "book.txt").read_text(), verbose=False).input_ids
    monkeypatch.setattr(needle, "WRONG", 4)
    prompt = needle.make_prompt(tokenizer, filler, 200, 0.25, 3)
    assert len(prompt.ids) == 200
    decoded = tokenizer.decode(prompt.ids)
    fact = decoded.index(f"is {prompt.number}.")
    assert 0.1 < fact / len(decoded) < 0.5
    assert decoded.endswith(" is")
    assert tokenizer.decode(prompt.choices[0]).strip() == prompt.number
    other = needle.make_prompt(tokenizer, filler, 200, 0.75, 4)
    pruned = kvprune.load(load_base(root / "model", "float32"), root / "strong")
    with torch.inference_mode(), pruned.evaluating():
        row = needle.ask(pruned, tokenizer, [other, prompt])[1]
        assert row == pytest.approx(needle.ask(pruned, tokenizer, [prompt])[0], abs=1e-3)
        scores = []
        for choice in prompt.choices:
            ids = torch.tensor([[*prompt.ids, *choice]])
            log_p = pruned.model(ids, use_cache=False).logits[0].log_softmax(-1)
            scores.append(sum(float(log_p[199 + i, token]) for i, token in enumerate(choice)))
    assert row["log_p"] == pytest.approx(scores[0], abs=1e-3)
    assert row["better"] == sum(s < scores[0] for s in scores[1:]) / 4
    assert row["kept"] < row["seen"] == 200


def test_needle_runs_end_to_end(root, tmp_path, monkeypatch, capsys):
    run(needle, monkeypatch, root / "model", root / "strong", "--text", root / "book.txt",
        "--contexts", "160", "--depths", "0.2,0.8", "--seeds", 1, "--methods", "dense,ours,tova",
        "--runs", tmp_path / "runs", "--docs", tmp_path / "docs")  # fmt: skip
    rows = rows_of(tmp_path / "docs", "smollm2_needle")
    assert [(row["method"], row["depth"]) for row in rows] == [
        (method, depth) for method in ("dense", "ours", "tova") for depth in (0.2, 0.8)
    ]
    by_method = {row["method"]: row["sparsity"] for row in rows}
    assert by_method["dense"] == 0 < by_method["ours"]
    assert by_method["tova"] == pytest.approx(by_method["ours"], abs=0.1)


def test_speed_measures_and_counts(root, tmp_path, monkeypatch, capsys):
    run(speed, monkeypatch, root / "model", root / "strong", "--text", root / "book.txt",
        "--context", 64, "--batches", "2", "--steps", 1, "--repeats", 1, "--dtypes", "float32",
        "--memory", 0.1, "--fit-contexts", "64,256", "--runs", tmp_path / "runs",
        "--docs", tmp_path / "docs")  # fmt: skip
    rows = rows_of(tmp_path / "docs", "smollm2_speed")
    sides = [row["side"] for row in rows if row["measured"] == "speed"]
    assert sides == ["dense", "dense, static", "pruned"]
    (check,) = (row for row in rows if row["measured"] == "storages")
    assert check["dense_bytes"] == check["dense_formula"]
    assert check["bytes_none"] <= check["bytes"]
    for row in (row for row in rows if row["measured"] == "fits"):
        used = 4 * 5.9e6 + row["dense_batch"] * row["dense_row_bytes"]
        assert used < 0.1e9 < used + 2 * row["dense_row_bytes"]
        assert row["batch"] > 0


def test_shrunk_adapters_load_and_are_half_the_size(root, tmp_path):
    before, after = shrink.shrink(root / "strong", tmp_path / "half")
    # tensors of half the size, names of the same length
    assert 0.5 < after / before < 0.75
    ids = torch.arange(1, 41)[None]
    logits = []
    for folder in (root / "strong", tmp_path / "half"):
        pruned = kvprune.load(load_base(root / "model", "float32"), folder)
        assert pruned.interactions[0].query.weight.dtype == torch.float32
        with torch.no_grad(), pruned.evaluating():
            logits.append(pruned.model(ids, use_cache=False).logits)
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.5
    with pytest.raises(PruneError, match="overwrite the adapter itself"):
        shrink.shrink(root / "strong", root / "strong")
    numbers, saved = size.sizes(str(root / "model"), 4, 8)
    assert 2 * numbers < saved < 2 * numbers + 20_000


def test_the_chat_that_is_explained(root, capsys):
    pruned = kvprune.load(load_base(root / "model", "float32"), root / "strong")
    tokenizer = load_tokenizer(root / "model")
    trace = forgets.chat(pruned, tokenizer, ("Who are you?", "And I?"), 6)
    assert trace.text.count("<user>") == 2
    assert len(trace.tokens) - trace.prompt == 6
    assert trace.sparsity[:, -1].mean() > 0
