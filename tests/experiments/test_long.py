"""Long training of SmolLM2, at toy size on the package's small model: questions, answers, texts."""

import gzip
import itertools
import json
import random
import shutil
import sys

import pytest
import torch

import kvprune
from experiments.smollm2 import answers, held_out, long, mixture, prompts, repeats, validate
from experiments.smollm2.text import Document, grams
from helpers import uneven_gates
from kvprune import tiny
from kvprune.adapters import lora
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.errors import PruneError
from kvprune.train import spread

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FOLDERS = {
    "books-x": "books/x/", "encyclopedic-wikinews": "encyclopedic/wikinews/",
    "encyclopedic-openstax": "encyclopedic/openstax/biology/",
    "encyclopedic-wikipedia_bio": "encyclopedic/wikipedia_bio/",
    "encyclopedic-wikivoyage": "encyclopedic/wikivoyage/",
}  # fmt: skip


def words(seed, count):
    """Sentences of made-up words, which no other seed repeats."""
    draw = random.Random(seed)
    out = []
    for number in range(count):
        word = "".join(draw.choices("bcdfglmnprst", k=3)) + draw.choice("aeiou")
        out.append(word.capitalize() if number % 12 == 0 else word)
    sentences = [" ".join(out[i : i + 12]) + "." for i in range(0, count, 12)]
    return "\n\n".join(" ".join(sentences[i : i + 4]) for i in range(0, len(sentences), 4))


def document(name, count=1_200):
    return f"The {name.rsplit('/')[-1]}\n\n{words(name, count)}"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A corpus of every kind, WikiText's parts, and the small model with a chat template."""
    path = tmp_path_factory.mktemp("long")
    (path / "corpus").mkdir()
    for file, prefix in FOLDERS.items():
        size = 55_000 if prefix.startswith("books") else 1_200
        count = {"books/x/": 3, "encyclopedic/wikinews/": 90}.get(prefix, 40)
        rows = [
            {"id": f"{prefix}{i}", "text": document(f"{prefix}{i}", size)} for i in range(count)
        ]
        with gzip.open(path / f"corpus/{file}.jsonl.gz", "wt") as out:
            out.write("".join(json.dumps(row) + "\n" for row in rows))
    (path / "eval").mkdir()
    for part in ("valid", "test"):
        (path / f"eval/wikitext2_{part}.txt").write_text(words(part, 4_000))
    shutil.copytree(tiny.FOLDER, path / "model", ignore=shutil.ignore_patterns("*.gz", "*.py"))
    (path / "model/chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def parts(root):
    return held_out.split(held_out_read(root))


def held_out_read(root):
    from experiments.smollm2.text import read

    return list(read(root / "corpus"))


def test_every_document_is_in_one_part(root, parts):
    held = [*parts.valid.values(), *parts.test.values()]
    names = [d.name for group in [parts.train, *held] for d in group]
    assert sorted(names) == sorted(d.name for d in held_out_read(root))
    assert set(parts.valid) == set(parts.test) == {"book", "news", *held_out.FOLDERS}
    assert all(parts.valid.values())
    assert all(parts.test.values())


@pytest.mark.parametrize("kind", sorted(prompts.KINDS))
def test_questions_have_no_gaps_left(kind, monkeypatch):
    monkeypatch.setattr(prompts, "KINDS", {**prompts.KINDS, kind: prompts.KINDS[kind]})
    text = document("some/place", 600) + "\n\nHe met {name} in Paris, and {title} stayed."
    asked = Document("encyclopedic", "some/place", text)
    seen = [row for i in range(400) if (row := prompts.make(asked, i))["kind"] == kind]
    assert seen
    assert {len(row["turns"]) for row in seen} <= {1, 2, 3, 4}
    for row in seen:
        for turn in row["turns"]:
            # what the document itself has in braces stays
            left = turn.replace("met {name} in", "").replace("and {title} stayed", "")
            assert "{name}" not in left
            assert "{title}" not in left
            assert "{text}" not in left
    assert prompts.make(asked, 3) == prompts.make(asked, 3)
    assert any(a["turns"] != b["turns"] for a, b in itertools.pairwise(seen))


@pytest.fixture(scope="module")
def chats(root):
    """Of training and held-out documents, each answered by the small model."""
    files = {}
    for part in ("train", "valid"):
        files[part] = root / f"{part}_chats.jsonl"
        arguments = [
            "answers", str(root / "model"), "--corpus", str(root / "corpus"), "--part", part,
            "--out", str(files[part]), "--count", "10", "--batch", "4", "--new-tokens", "5",
            "--dtype", "float32",
        ]  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", arguments)
            patch.setattr(answers, "LONGEST", 200)
            answers.main()
            # a kill in the middle of a line: what is missing is answered again, and nothing else
            whole = files[part].read_text().splitlines(keepends=True)
            files[part].write_text("".join(whole[:7]) + whole[7][:20])
            answers.main()
        again = files[part].read_text().splitlines(keepends=True)
        assert again[:7] == whole[:7]
        assert sorted(json.loads(a)["id"] for a in again) == sorted(
            json.loads(a)["id"] for a in whole
        )
    return files


def test_answers_are_the_models_own(root, chats):
    """Greedy answers equal a plain greedy continuation of the same prompt."""
    tokenizer = load_tokenizer(str(root / "model"))
    model = load_base(root / "model", "float32")
    rows = [json.loads(line) for line in chats["train"].read_text().splitlines()]
    greedy = [r for r in rows if not r["sampled"] and r["messages"]]
    assert greedy
    for row in greedy:
        *asked, answer = row["messages"]
        assert answer["role"] == "assistant"
        prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        for _ in range(5):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
        want = tokenizer.decode(ids[0, -5:], skip_special_tokens=True)
        assert want.startswith(answer["content"].rstrip("\n"))


def test_a_passage_returns():
    draw = random.Random(1)
    texts = [repeats.passage(document("a"), document("b"), draw) for _ in range(20)]
    for text in texts:
        found = list(grams(text))
        assert len(found) - len(set(found)) > 2, "a run of 13 words appears twice"
    plain = list(grams(document("a") + document("b")))
    assert len(plain) == len(set(plain))


@pytest.mark.parametrize("way", [repeats.captions, repeats.lists])
def test_captions_and_lists_return(way):
    text = way(document("a"), document("b"), random.Random(0))
    lines = [line.strip("-*|[]; ").lower() for line in text.splitlines()]
    short = [line[-40:-1] for line in lines if len(line) > 50]
    assert any(text.lower().count(line) > 1 for line in short)


def test_code_is_followed_by_an_edit():
    code = "import os\n\ndef first(numbers):\n    total = 0\n" + "    total += numbers[0]\n" * 12
    (pair,) = repeats.edited("a.py", code)
    old, new = pair.split("```\n\n```python")
    assert old != new
    assert len(set(new.split()) - set(old.split())) >= 1


@pytest.fixture(scope="module")
def texts(root, chats):
    out = root / "texts"
    arguments = [
        "mixture", str(root / "model"), "--corpus", str(root / "corpus"), "--eval",
        str(root / "eval"), "--chats", str(chats["train"]), "--tokens", "60000", "--out", str(out),
    ]  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        mixture.main()
    return out


def test_the_mixture_has_all_kinds_and_nothing_held_out(texts):
    rows = [json.loads(line) for line in (texts / "train.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == set(mixture.SHARES)
    held = {g for f in texts.glob("*_*.txt") for g in grams(f.read_text())}
    assert len(list(texts.glob("valid_*.txt"))) == len(list(texts.glob("test_*.txt"))) == 6
    for row in rows:
        assert len(held & set(grams(row["text"]))) <= 3, row["id"]
    about = json.loads((texts / "about.json").read_text())
    names = {name for part in ("valid", "test") for group in about[part].values() for name in group}
    assert not names & {row["id"] for row in rows}


def test_a_wikitext_that_is_missing(tmp_path):
    with pytest.raises(PruneError, match="has no wikitext2_valid"):
        mixture.wikitext_file(tmp_path, "valid")


def test_repeated_tokens():
    ids = torch.tensor([1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 7])
    marks = validate.repeated(ids)
    assert marks.nonzero().flatten().tolist() == [10]


@pytest.fixture(scope="module")
def adapter(root):
    """LoRA and gates of random weights, saved as a run would."""
    model = load_base(root / "model", "float32")
    torch.manual_seed(0)
    lora.add(model, 2, 4.0)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    uneven_gates(pruned, spread=0.6)
    spread.scale(pruned, spread.factors(pruned))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    pruned.save(root / "adapter")
    return root / "adapter"


def test_validation_against_plain_sums(root, texts, chats, adapter, monkeypatch):
    log = root / "validation.jsonl"
    arguments = [
        "validate", str(root / "model"), str(adapter), "--texts", str(texts), "--chats",
        str(chats["valid"]), "--context", "64", "--windows", "2", "--log", str(log),
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", arguments)
    validate.main()
    validate.main()
    (row,) = map(json.loads, log.read_text().splitlines())
    assert set(row["texts_measured"]) == {"wikitext", "book", "news", *held_out.FOLDERS}
    tokenizer = load_tokenizer(str(root / "model"))
    ids = validate.windows((texts / "valid_news.txt").read_text(), tokenizer, 64, 2)
    dense = load_base(root / "model", "float32")
    with kvprune.load(load_base(root / "model", "float32"), adapter) as pruned, torch.no_grad():
        losses = []
        for model in (dense, pruned.model):
            logits = model(ids, use_cache=False).logits[:, 31:-1].flatten(0, 1)
            losses.append(torch.nn.functional.cross_entropy(logits, ids[:, 32:].flatten()))
        kept = [(pruned.trace(window.tolist())[..., :63] > 63).float().mean() for window in ids]
    measured = row["texts_measured"]["news"]
    assert measured["ratio"] != pytest.approx(1.0, abs=1e-3)
    assert measured["ratio"] == pytest.approx(float((losses[1] - losses[0]).exp()), rel=1e-4)
    assert measured["sparsity"] == pytest.approx(1 - float(sum(kept) / 2), abs=1e-5)
    assert row["chat_kl"] > 0
    assert 0 <= row["chat_same"] <= 1


def test_answers_are_what_counts_in_chats(root, tmp_path):
    tokenizer = load_tokenizer(str(root / "model"))
    messages = [
        {"role": "user", "content": "Good day"}, {"role": "assistant", "content": "to you"},
        {"role": "user", "content": "and again"}, {"role": "assistant", "content": "yes"},
    ]  # fmt: skip
    (tmp_path / "chats").write_text(json.dumps({"messages": messages}) + "\n")
    ((ids, own),) = validate.answered(tmp_path / "chats", tokenizer)
    said = tokenizer.decode(ids[own])
    assert said == "<assistant>to you</assistant>\n<assistant>yes</assistant>\n"


def test_stages(root, texts, chats, adapter, tmp_path, monkeypatch):
    """A stage trains from an adapter, is validated, and is not trained again."""
    quick = {
        "gamma": 0.2, "steps": 2, "save_every": 1, "eval_every": 2, "probe_every": 2, "average": 2,
        "lora_rank": 2, "lora_alpha": 4.0, "warmup": 0, "alpha_start": 3.0,
    }  # fmt: skip
    monkeypatch.setattr(long, "BASE", str(root / "model"))
    monkeypatch.setattr(long, "LENGTH", 64)
    monkeypatch.setattr(long.registry, "FOLDER", root)
    monkeypatch.setattr(long, "STAGES", {
        "80a": {"start": "adapter", "train": quick}, "80b": {"start": "80a", "train": quick},
    })  # fmt: skip
    validated = []
    monkeypatch.setattr(long, "VALIDATE_EVERY", 2)
    monkeypatch.setattr(
        long,
        "validate",
        lambda folder, *args: validated.append(
            (
                str(folder.relative_to(tmp_path / "runs")),
                args[-1],
                (folder / "kvprune.safetensors").is_file(),
            )
        ),
    )
    recipe = long.read_yaml(long.RECIPE)
    recipe["method"] = {"method": "pruning", "rank": 8}
    monkeypatch.setattr(long, "read_yaml", lambda path: recipe)
    runs = tmp_path / "runs"
    arguments = ["long", "80a", "80b", "--texts", str(texts), "--runs", str(runs)]
    monkeypatch.setattr(sys, "argv", arguments)
    long.main()
    for name in ("80a", "80b"):
        assert (runs / name / "kvprune.safetensors").is_file()
        card = (runs / name / "README.md").read_text()
        assert str(tmp_path) not in card
    assert validated == [
        ("80a/checkpoint-2/mean", "80a at 2", True), ("80a", "80a", True),
        ("80b/checkpoint-2/mean", "80b at 2", True), ("80b", "80b", True),
    ]  # fmt: skip
    when = (runs / "80a/kvprune.safetensors").stat().st_mtime_ns
    long.main()
    assert (runs / "80a/kvprune.safetensors").stat().st_mtime_ns == when
    with pytest.raises(PruneError, match="stage 'x' is unknown"):
        long.settings("x", texts, runs)
    with pytest.raises(PruneError, match=r"80b starts from .*80a, which is not trained yet"):
        long.settings("80b", texts, tmp_path)
