"""Text to rows of tokens: every kind of source, the split, the cache and the errors."""

import gzip
import json
import logging
import os
import pickle
import random
import re
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, default_data_collator

from kvprune.errors import PruneError
from kvprune.text import sources, tokens
from kvprune.text.rows import DataConfig, Rows, begin_with_documents, load_rows, split
from kvprune.text.tokens import Tokens, tokenise

WORDS = ["the", "a", "lantern", "walked", "under", "silver", "hill", "naïve", "雨", ",", "1911"]


def story(number: int, words: int = 60) -> str:
    chosen = random.Random(number).choices(WORDS, k=words)
    return f"Story {number}\n\n" + " ".join(chosen)


def tiny_tokenizer(vocab: int = 400) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([story(i) for i in range(20)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", model_max_length=32)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPRUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def stories(tmp_path):
    """A hundred documents in a file, and what they are."""
    documents = [story(i) for i in range(100)]
    return write(tmp_path / "stories.jsonl", documents), documents


def write(file: Path, documents: list[str], field: str = "text") -> str:
    """The documents in the format that the file's name says."""
    rows = [{"id": i, field: text} for i, text in enumerate(documents)]
    lines = "\n".join(json.dumps(row) for row in rows)
    if file.name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=3)
    elif file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines.encode()))
    elif file.suffix == ".json":
        file.write_text(json.dumps(rows, indent=2))
    else:
        file.write_text(lines)
    return str(file)


def plain(documents: list[str], tokenizer) -> list[int]:
    """The version that is too simple to be wrong."""
    ids = []
    for text in documents:
        ids += [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return ids


def joined(rows: Rows) -> list[int]:
    return [i for row in range(len(rows)) for i in rows[row]["input_ids"].tolist()]


def texts(rows: Rows, tokenizer) -> list[str]:
    """The documents of which every token is in the rows; the last may be cut off."""
    return tokenizer.decode(joined(rows)).split("<eos>")[:-1]


# reading


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet", "A.JSONL"])
def test_rows_of_a_file_are_documents(name, tmp_path, tokenizer):
    documents = [story(i) for i in range(7)]
    file = write(tmp_path / name, documents)
    assert tokenise([file], tokenizer).ids.tolist() == plain(documents, tokenizer)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.txt.gz"])
def test_a_text_file_is_one_document(name, tmp_path, tokenizer):
    data = ("\ufeff" + story(0).replace("\n", "\r\n")).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    got = tokenise([str(tmp_path / name)], tokenizer)
    assert got.ids.tolist() == plain([story(0)], tokenizer)


def test_json_lines_may_be_called_json(tmp_path, tokenizer):
    file = tmp_path / "a.json"
    file.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert tokenise([str(file)], tokenizer).ids.tolist() == plain(["one", "two"], tokenizer)


def test_a_folder_is_read_in_name_order_without_other_files(tmp_path, tokenizer):
    (tmp_path / "b" / ".hidden").mkdir(parents=True)
    (tmp_path / "b" / "2.txt").write_text("third")
    (tmp_path / "b" / "10.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "b" / ".hidden" / "x.txt").write_text("not this")
    (tmp_path / "empty.txt").write_text("")
    got = tokenise([str(tmp_path)], tokenizer)
    assert got.ids.tolist() == plain(["first", "second", "third"], tokenizer)


@pytest.mark.parametrize("pattern", ["*.txt", "**/*.txt", "**", "[ab].txt"])
def test_a_pattern(pattern, tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.rst").write_text("not this")
    got = tokenise([str(tmp_path / pattern)], tokenizer)
    assert got.ids.tolist() == plain(["first", "second"], tokenizer)


def test_several_sources_and_another_field(tmp_path, tokenizer):
    one = write(tmp_path / "b.jsonl", ["one"], field="body")
    two = write(tmp_path / "a.parquet", ["two"], field="body")
    got = tokenise([one, two], tokenizer, text_field="body")
    assert got.ids.tolist() == plain(["one", "two"], tokenizer)


def test_blank_and_missing_texts_are_skipped(tmp_path, tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": ""}\n{"text": null}\n{"text": " \\n"}\n{"text": "one"}')
    got = tokenise([str(file)], tokenizer)
    assert got.ids.tolist() == plain(["one"], tokenizer)
    assert len(got.documents) == 1


def test_rows_can_be_lines_of_longer_documents(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", ["one\n", " two", "", "four", "five"])
    got = tokenise([file], tokenizer, rows_per_document=2)
    assert got.ids.tolist() == plain(["one\n two", "\nfour", "five"], tokenizer)


def test_text_that_looks_like_a_date_stays_text(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", ["2020-01-01", "2020-01-02"])
    assert tokenise([file], tokenizer).ids.tolist() == plain(
        ["2020-01-01", "2020-01-02"], tokenizer
    )


def test_max_tokens_counts_for_each_source(tmp_path, tokenizer):
    one = [story(i) for i in range(5)]
    two = [story(i) for i in range(5, 10)]
    files = [write(tmp_path / "1.jsonl", one), write(tmp_path / "2.jsonl", two)]
    got = tokenise(files, tokenizer, max_tokens=333)
    assert got.ids.tolist() == plain(one, tokenizer)[:333] + plain(two, tokenizer)[:333]


def test_a_first_token_of_the_tokenizer_is_kept(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<bos>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bos)]
    )
    file = write(tmp_path / "a.jsonl", ["one", "two"])
    want = [bos, *plain(["one"], tokenizer), bos, *plain(["two"], tokenizer)]
    assert tokenise([file], tokenizer).ids.tolist() == want


def test_a_very_long_text_is_split_between_tokens(tmp_path, tokenizer, monkeypatch):
    text = " ".join(story(i) for i in range(50))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(tokens, "PIECE", 100)
    assert len(tokens._pieces(text)) > 50
    assert "".join(tokens._pieces(text)) == text
    assert "".join(tokens._pieces("x" * 950)) == "x" * 950
    got = tokenise([str(tmp_path / "a.txt")], tokenizer)
    assert got.ids.tolist() == plain([text], tokenizer)


def test_many_batches_equal_one(stories, tokenizer, monkeypatch):
    file, documents = stories
    monkeypatch.setattr(tokens, "BATCH", 1000)
    assert tokenise([file], tokenizer).ids.tolist() == plain(documents, tokenizer)


def test_a_large_vocabulary_is_stored_in_wider_integers(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"<{i}>" for i in range(70_000)])
    file = write(tmp_path / "a.jsonl", ["one <69999> <3>"])
    got = tokenise([file], tokenizer)
    assert got.ids.max() > 1 << 16
    assert got.ids.tolist() == plain(["one <69999> <3>"], tokenizer)


def test_long_texts_give_no_warning(stories, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = tiny_tokenizer()
    tokenise([stories[0]], tokenizer)
    assert not caplog.records
    tokenizer(stories[1][0])
    assert "longer than the specified maximum" in caplog.text


# the hub


class FakeHub:
    """Stands for datasets.load_dataset and notes how it was called."""

    def __init__(self, rows, script=False):
        self.rows, self.script, self.calls = rows, script, []

    def __call__(self, path, name=None, **options):
        self.calls.append((path, name, options))
        if self.script and "revision" not in options:
            raise RuntimeError("Dataset scripts are no longer supported, but found bookcorpus.py")
        return datasets.Dataset.from_list(self.rows).to_iterable_dataset()


def test_wikipedia_by_name(tokenizer, monkeypatch):
    hub = FakeHub([{"title": "One", "text": "one"}, {"title": "Two", "text": "two"}])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    got = tokenise(["wikipedia"], tokenizer)
    assert got.ids.tolist() == plain(["one", "two"], tokenizer)
    assert hub.calls == [
        ("legacy-datasets/wikipedia", "20220301.en", {"split": "train", "streaming": True})
    ]


def test_bookcorpus_by_name_joins_its_sentences(tokenizer, monkeypatch):
    sentences = [f"sentence {i} ." for i in range(1500)]
    hub = FakeHub([{"text": text} for text in sentences], script=True)
    monkeypatch.setattr(datasets, "load_dataset", hub)
    got = tokenise(["bookcorpus"], tokenizer)
    want = plain(["\n".join(sentences[:1000]), "\n".join(sentences[1000:])], tokenizer)
    assert got.ids.tolist() == want
    assert hub.calls[1] == (
        "bookcorpus/bookcorpus",
        None,
        {
            "data_files": {"train": "plain_text/train/*.parquet"},
            "revision": "refs/convert/parquet",
            "split": "train",
            "streaming": True,
        },
    )


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("someone/texts", ("someone/texts", None, "train")),
        ("someone/texts:small", ("someone/texts", "small", "train")),
        ("someone/texts@test", ("someone/texts", None, "test")),
        ("someone/texts-1.0:a-b.c@validation", ("someone/texts-1.0", "a-b.c", "validation")),
    ],
)
def test_hub_names(source, call, tokenizer, monkeypatch):
    hub = FakeHub([{"text": "one"}])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    tokenise([source], tokenizer, streaming=False)
    [(path, name, options)] = hub.calls
    assert (path, name, options["split"], options["streaming"]) == (*call, False)


def test_a_hub_dataset_is_read_only_as_far_as_needed(tokenizer, monkeypatch):
    def rows():
        for i in range(5):
            yield {"text": story(i)}
        pytest.fail("read on")

    monkeypatch.setattr(tokens, "BATCH", 1)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows())
    assert len(tokenise(["someone/texts"], tokenizer, max_tokens=200).ids) == 200


def test_a_cached_hub_dataset_needs_no_hub(tokenizer, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", FakeHub([{"text": story(0)}]))
    first = tokenise(["someone/texts"], tokenizer)
    monkeypatch.setattr(datasets, "load_dataset", None)
    assert (tokenise(["someone/texts"], tokenizer).ids == first.ids).all()


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ConnectionError("no route"), "hub cannot be reached .no route.*download it elsewhere"),
        (datasets.exceptions.DatasetNotFoundError("no"), "nor an open dataset of the hub.*auth"),
        (ValueError("BuilderConfig 'x' not found"), "BuilderConfig 'x' not found.*:config@split"),
        (RuntimeError("other"), "cannot be read from the hub: RuntimeError: other"),
    ],
)
def test_errors_of_the_hub(error, says, tokenizer, monkeypatch, cache):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(PruneError, match=f"someone/texts.*{says}"):
        tokenise(["someone/texts"], tokenizer)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]


def test_a_hub_dataset_without_the_field(tokenizer, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", FakeHub([{"title": "One", "body": "one"}]))
    with pytest.raises(PruneError, match=r"someone/texts, row 1 has no field 'text', only .*body"):
        tokenise(["someone/texts"], tokenizer)


# rows


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    length=st.integers(2, 7),
    picked=st.randoms(use_true_random=False),
)
def test_rows_are_the_spans_end_to_end(sizes, length, picked):
    ends = np.cumsum(sizes)
    spans = [[int(end) - size, int(end)] for size, end in zip(sizes, ends, strict=True)]
    spans = picked.sample(spans, k=picked.randint(1, len(spans)))
    corpus = Tokens(Path(), np.arange(ends[-1], dtype=np.uint16), np.empty(0))
    rows = Rows(corpus, np.array(spans), length)
    want = [i for start, stop in spans for i in range(start, stop)]
    assert len(rows) == len(want) // length
    assert joined(rows) == want[: len(rows) * length]
    with pytest.raises(IndexError):
        rows[len(rows)]
    if len(rows):
        assert rows[-1]["input_ids"].tolist() == rows[len(rows) - 1]["input_ids"].tolist()


def test_only_the_last_incomplete_row_is_left_out(stories, tokenizer):
    file, documents = stories
    data = load_rows(DataConfig((file,), length=50, held_out=0.1), tokenizer)
    want = Counter(plain(documents, tokenizer))
    got = Counter(joined(data.train)) + Counter(joined(data.held_out))
    assert not got - want
    assert (want - got).total() < 2 * 50
    assert data.train.tokens + data.held_out.tokens == want.total()


def test_shuffling_keeps_documents_intact(stories, tokenizer):
    file, documents = stories
    data = load_rows(DataConfig((file,), length=50, held_out=0), tokenizer)
    got = texts(data.train, tokenizer)
    assert data.held_out is None
    assert set(got) < set(documents)
    assert len(got) >= 99
    assert got != documents[: len(got)]


def test_the_seed_orders_training_only(stories, tokenizer):
    file, _ = stories
    one, same, other = (
        load_rows(DataConfig((file,), length=50, held_out=0.1, seed=seed), tokenizer)
        for seed in (1, 1, 2)
    )
    assert joined(one.train) == joined(same.train)
    assert joined(one.train) != joined(other.train)
    assert joined(one.held_out) == joined(other.held_out)


def test_rows_suit_the_trainer(stories, tokenizer):
    data = load_rows(DataConfig(stories[0], length=50, held_out=0), tokenizer)
    batch = default_data_collator([data.train[0], data.train[1]])
    assert batch["input_ids"].shape == (2, 50)
    assert batch["input_ids"].dtype == torch.int64
    assert (batch["labels"] == batch["input_ids"]).all()


def test_a_worker_process_maps_the_file_again(stories, tokenizer):
    data = load_rows(DataConfig(stories[0], length=50), tokenizer)
    pickled = pickle.dumps(data.train.corpus)
    assert len(pickled) < 1000
    assert joined(pickle.loads(pickle.dumps(data.train))) == joined(data.train)


PRINT_ROWS = """
import sys
from transformers import AutoTokenizer
from kvprune.text.rows import DataConfig, load_rows
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
data = load_rows(DataConfig(sys.argv[2], length=50, held_out=0.1), tokenizer)
print([row["input_ids"].tolist() for part in (data.train, data.held_out) for row in part])
"""


def test_every_process_gets_the_same_rows(stories, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    environment = {
        "PYTHONHASHSEED": "4242",
        "TOKENIZERS_PARALLELISM": "false",
        "KVPRUNE_CACHE": str(tmp_path / "another cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", PRINT_ROWS, str(tmp_path / "tokenizer"), stories[0]],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    data = load_rows(DataConfig(stories[0], length=50, held_out=0.1), tokenizer)
    rows = [row["input_ids"].tolist() for part in (data.train, data.held_out) for row in part]
    assert json.loads(done.stdout) == rows


# the split


@pytest.mark.parametrize(("held_out", "at_least"), [(0.1, 0.1), (0.001, 0), (20, 0)])
def test_no_document_is_in_both_parts(held_out, at_least, stories, tokenizer):
    file, documents = stories
    data = load_rows(DataConfig((file,), length=50, held_out=held_out), tokenizer)
    train, kept = texts(data.train, tokenizer), texts(data.held_out, tokenizer)
    assert set(train) | set(kept) <= set(documents)
    assert not set(train) & set(kept)
    total = len(plain(documents, tokenizer))
    target = max(50, at_least * total, held_out * 50 if held_out >= 1 else 0)
    assert target <= data.held_out.tokens < 2 * target + max(map(len, documents))
    if held_out >= 1:
        assert len(data.held_out) >= held_out


def test_copies_of_a_held_out_document_are_not_trained_on(tmp_path, tokenizer):
    documents = [story(i) for i in range(50)]
    file = write(tmp_path / "a.jsonl", documents * 3)
    data = load_rows(DataConfig((file,), length=50, held_out=0.2), tokenizer)
    train, kept = texts(data.train, tokenizer), texts(data.held_out, tokenizer)
    assert kept
    assert not set(train) & set(kept)
    assert Counter(train).most_common(1)[0][1] == 3


def test_the_same_documents_are_held_out_when_files_are_renamed_or_split(tmp_path, tokenizer):
    documents = [story(i) for i in range(100)]
    one = write(tmp_path / "one.jsonl", documents)
    parts = [
        write(tmp_path / "x.parquet", documents[60:]),
        write(tmp_path / "y.jsonl", documents[:60]),
    ]
    got = [
        joined(load_rows(DataConfig(files, length=50, held_out=0.1), tokenizer).held_out)
        for files in ([one], parts)
    ]
    assert got[0] == got[1]


def test_the_tail_of_a_single_document_is_held_out(tmp_path, tokenizer):
    text = " ".join(story(i) for i in range(50))
    (tmp_path / "book.txt").write_text(text)
    data = load_rows(DataConfig(str(tmp_path / "book.txt"), length=50, held_out=0.1), tokenizer)
    ids = plain([text], tokenizer)
    assert data.held_out.tokens == -(-len(ids) // 10)
    assert joined(data.train) + joined(data.held_out) == [
        *ids[: len(data.train) * 50],
        *ids[data.train.tokens :][: len(data.held_out) * 50],
    ]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=10),
    copies=st.lists(st.integers(0, 9), max_size=4),
    target=st.integers(5, 40),
)
@example(sizes=[30, 30], copies=[], target=10)  # whole would be more than twice the target
@example(sizes=[20], copies=[], target=12)  # whole would leave nothing to train on
@example(sizes=[9, 9], copies=[0, 1], target=10)
def test_a_split_is_a_partition(sizes, copies, target):
    length = 5
    sizes += [sizes[copy % len(sizes)] for copy in copies]
    digests = [*range(len(sizes) - len(copies)), *(c % (len(sizes) - len(copies)) for c in copies)]
    digests = np.array(digests, np.uint64) * 7919 % 97
    ends = np.cumsum(sizes)
    spans = np.stack([ends - sizes, ends], axis=1)
    train, kept = split(spans, digests, target, length)
    taken = [i for start, stop in [*train, *kept] for i in range(start, stop)]
    assert len(taken) == len(set(taken))
    of = np.repeat(digests, sizes)
    held = {int(of[i]) for start, stop in kept for i in range(start, stop)}
    # only further copies of held-out documents are in neither
    assert all(int(of[i]) in held for i in set(range(ends[-1])) - set(taken))
    if not copies and ends[-1] >= target + length:
        assert (kept[:, 1] - kept[:, 0]).sum() in range(target, 2 * target + 1)
        assert (train[:, 1] - train[:, 0]).sum() >= length
    shared = {int(of[start]) for start, _ in train} & held
    assert len(shared) <= 1


def test_all_of_a_held_out_source_is_kept_out_of_training(tmp_path, tokenizer):
    documents = [story(i) for i in range(40)]
    file = write(tmp_path / "a.jsonl", documents)
    other = write(tmp_path / "b.jsonl", documents[30:])
    data = load_rows(DataConfig((file,), length=50, held_out_source=other), tokenizer)
    assert data.train.tokens == len(plain(documents[:30], tokenizer))
    assert data.held_out.tokens == len(plain(documents[30:], tokenizer))


# the cache


class Untouchable:
    """The tokenizer, but it must not be asked to tokenise a text."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, *_, **__):
        raise AssertionError("tokenised again")


def test_text_is_tokenised_once_for_all_lengths_seeds_and_splits(stories, tokenizer):
    file, _ = stories
    load_rows(DataConfig((file,), length=50), tokenizer)
    again = DataConfig((file,), length=20, seed=3, held_out=7)
    assert len(load_rows(again, Untouchable(tokenizer)).held_out) >= 7


def test_earlier_use_of_the_tokenizer_does_not_matter(stories, tokenizer):
    tokenise([stories[0]], tokenizer)
    tokenizer(["one two three four"], truncation=True, max_length=2)
    tokenise([stories[0]], Untouchable(tokenizer))


@pytest.mark.parametrize("change", ["file", "same size", "tokenizer", "eos", "field", "max_tokens"])
def test_another_text_or_tokenizer_is_tokenised_again(change, tmp_path, tokenizer):
    def rows(text):
        return json.dumps({"text": text, "body": "quite another"})

    file = tmp_path / "a.jsonl"
    file.write_text(rows("silver hill"))
    tokenise([str(file)], tokenizer)
    text, options = "silver hill", {}
    if change == "file":
        text = "the naïve hill"
        file.write_text(rows(text))
    elif change == "same size":
        text = "hill silver"
        file.write_text(rows(text))
        stat = file.stat()
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1000))
    elif change == "tokenizer":
        tokenizer = tiny_tokenizer(vocab=270)
    elif change == "eos":
        tokenizer = tiny_tokenizer()
        tokenizer.eos_token = "<bos>"
    elif change == "field":
        text, options = "quite another", {"text_field": "body"}
    elif change == "max_tokens":
        options = {"max_tokens": 2}
    got = tokenise([str(file)], tokenizer, **options)
    assert got.ids.tolist() == plain([text], tokenizer)[: options.get("max_tokens")]


@pytest.mark.parametrize("step", ["_digest", "os.replace"])
def test_a_run_that_is_stopped_leaves_nothing_to_read(step, stories, tokenizer, cache, monkeypatch):
    class Stopped(BaseException):
        pass

    def stop(*_):
        raise Stopped

    with monkeypatch.context() as patched:
        patched.setattr(f"kvprune.text.tokens.{step}", stop)
        with pytest.raises(Stopped):
            tokenise([stories[0]], tokenizer)
    assert not [entry for entry in cache.iterdir() if entry.is_dir()]
    assert tokenise([stories[0]], tokenizer).ids.tolist() == plain(stories[1], tokenizer)


def test_what_a_killed_run_left_is_not_read(stories, tokenizer, cache):
    complete = tokenise([stories[0]], tokenizer).folder
    partial = complete.rename(complete.with_name(f"{complete.name}.partial"))
    (partial / "tokens.bin").write_bytes(b"\1\2\3\4")
    (partial / "about.json").unlink()
    assert tokenise([stories[0]], tokenizer).ids.tolist() == plain(stories[1], tokenizer)
    assert not partial.exists()


@pytest.mark.parametrize("file", ["tokens.bin", "documents.npy", "about.json"])
@pytest.mark.parametrize("size", [0, 100, None])
def test_a_damaged_cache_is_written_again(file, size, stories, tokenizer):
    folder = tokenise([stories[0]], tokenizer).folder
    if size is None:
        (folder / file).unlink()
    else:
        os.truncate(folder / file, size)
    assert tokenise([stories[0]], tokenizer).ids.tolist() == plain(stories[1], tokenizer)


def test_concurrent_calls_tokenise_once(stories, tokenizer, monkeypatch):
    writes, got = [], []
    write_once = tokens._write

    def slow(*arguments):
        writes.append(arguments)
        threading.Event().wait(0.2)
        return write_once(*arguments)

    monkeypatch.setattr(tokens, "_write", slow)
    threads = [
        threading.Thread(target=lambda: got.append(tokenise([stories[0]], tokenizer)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(writes) == 1
    assert [one.ids.tolist() for one in got] == [plain(stories[1], tokenizer)] * 4


def test_a_cache_that_cannot_be_written(stories, tokenizer, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(PruneError, match=r"cannot be written.*KVPRUNE_CACHE"):
        tokenise([stories[0]], tokenizer, cache_dir=tmp_path / "file")


def test_location_of_the_cache(monkeypatch):
    assert tokens.cache_folder("x") == Path("x")
    assert tokens.cache_folder() == Path(os.environ["KVPRUNE_CACHE"])
    monkeypatch.delenv("KVPRUNE_CACHE")
    assert tokens.cache_folder() == Path.home() / ".cache" / "kvprune"


# errors


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"", "a.txt holds no text"),
        ("a.txt", b" \n\n", "a.txt holds no text"),
        ("a.jsonl", b"", "a.jsonl holds no text"),
        ("a.json", b"", "a.json holds no text"),
        ("a.json", b"[]", "a.json holds no text"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "a.txt.gz holds no text"),
        ("a.txt", b"text \xff\xfe", r"a.txt is not UTF-8 text \(byte 0xff at 5\).*iconv"),
        ("a.txt", b"PK\3\4\0\0\0", "a.txt holds zero bytes.*iconv"),
        ("a.txt", "text".encode("utf-16"), "a.txt is not UTF-8.*iconv"),
        ("a.txt.gz", b"not gzip", "a.txt.gz is not gzip.*remove .gz"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "x"}' * 99, mtime=0)[:-9],
            "a.jsonl.gz .*truncated",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"text": "y\n', "a.jsonl, line 2 is not JSON .Unterminated"),
        ("a.jsonl", b'{"text": "x"}\n\xff\n', "a.jsonl, line 2 is not UTF-8"),
        (
            "a.jsonl",
            b'{"text": "x"}\n{"id": 1, "body": 2}',
            "line 2 has no field 'text', only id, body",
        ),
        ("a.jsonl", b'{"text": 3}', r"'text' in .*line 1 is int \(3\), not text"),
        ("a.jsonl", b'{"text": ["a"]}', r"'text' in .*line 1 is list"),
        ("a.jsonl", b'"just a string"', r'line 1 is str .*write it as {"text": "..."}'),
        ("a.jsonl", b'{"text": "\\ud800"}', "line 1 holds half a character"),
        ("a.json", b'[{"text": "x"},\n {"text": 2}]', "a.json, item 2 is int"),
        ("a.json", b'[{"text": "x"},\n {"text" "y"}]', "a.json, line 2 is not JSON"),
        ("a.parquet", b"PAR1 not really", "a.parquet is not parquet or is damaged"),
        ("a.parquet", b"", "a.parquet is not parquet or is damaged"),
        ("a.docx", b"PK", "a.docx is of an unknown type; known are .txt"),
    ],
)
def test_errors_in_a_file(name, content, says, tmp_path, tokenizer):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(PruneError, match=says):
        tokenise([str(tmp_path / name)], tokenizer)


def test_parquet_of_another_schema(tmp_path, tokenizer):
    pq.write_table(pa.table({"id": [1], "body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(PruneError, match=r"a.parquet has no field 'text', only id, body"):
        tokenise([str(tmp_path / "a.parquet")], tokenizer)
    with pytest.raises(PruneError, match=r"'id' in .*a.parquet, row 1 is int"):
        tokenise([str(tmp_path / "a.parquet")], tokenizer, text_field="id")


def test_missing_sources(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").touch()
    for source, says in [
        (tmp_path / "missing.txt", "missing.txt does not exist"),
        ("corpus/missing.jsonl", "corpus/missing.jsonl does not exist"),
        ("missing", "missing does not exist.*wikipedia or bookcorpus"),
        (tmp_path / "empty", "empty is empty"),
        (tmp_path / "pictures", "none of the 1 files in .*pictures is of a known type"),
        (tmp_path / "*.txt", "matches no file"),
    ]:
        with pytest.raises(PruneError, match=says):
            sources.find(str(source))


def test_an_unreadable_file(tmp_path, tokenizer, monkeypatch):
    def refuse(file):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.txt").write_text("text")
    monkeypatch.setattr(sources, "_open", refuse)
    with pytest.raises(PruneError, match=r"a.txt cannot be read: Permission denied"):
        tokenise([str(tmp_path / "a.txt")], tokenizer)


def test_too_little_text(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [story(0)])
    count = len(plain([story(0)], tokenizer))
    other = write(tmp_path / "b.jsonl", ["short"])
    for options, says in [
        ({"held_out": 0, "length": 999}, f"a.jsonl has {count} tokens, fewer than the 999"),
        ({"length": count}, f"has {count} tokens, but {count} to hold out.*need {2 * count}"),
        ({"length": 10, "held_out": 99}, "990 to hold out and a row of 10 to train on need 1000"),
        ({"length": 20, "held_out_source": other}, "b.jsonl has . tokens, fewer than the 20"),
        ({"length": 20, "held_out_source": file}, "without the held-out part has 0 tokens"),
    ]:
        with pytest.raises(PruneError, match=says):
            load_rows(DataConfig(file, **options), tokenizer)


def test_a_tokenizer_without_an_end_of_text_token(stories):
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(PruneError, match=r"no end-of-text token.*set tokenizer.eos_token"):
        tokenise([stories[0]], tokenizer)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sources": ()}, "sources is empty"),
        ({"length": 1}, "length=1 must be"),
        ({"held_out": -0.1}, "held_out=-0.1 must be"),
        ({"held_out": 1.5}, "held_out=1.5 must be"),
        ({"held_out": float("nan")}, "held_out=nan must be"),
        ({"held_out": float("inf")}, "held_out=inf must be"),
        ({"held_out": "0.1"}, "held_out='0.1' must be"),
        ({"seed": -1}, "seed=-1 must be"),
        ({"max_tokens": 0}, "max_tokens=0 must be"),
        ({"rows_per_document": 0}, "rows_per_document=0 must be"),
    ],
)
def test_invalid_settings(options, says):
    with pytest.raises(PruneError, match=says):
        DataConfig(**{"sources": ("a.txt",), **options})


def test_sources_may_be_a_single_name_or_paths():
    assert DataConfig("a.txt").sources == ("a.txt",)
    assert DataConfig(Path("a.txt")).sources == ("a.txt",)
    assert DataConfig([Path("a.txt"), "b"]).sources == ("a.txt", "b")


def test_the_code_of_the_docs_runs(tmp_path, tokenizer, monkeypatch, capsys):
    docs = Path(__file__).parents[2] / "docs" / "data.md"
    (tmp_path / "books").mkdir()
    for i in range(5):
        (tmp_path / "books" / f"{i}.txt").write_text(story(i, words=2000))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    hub = FakeHub([{"text": story(i, words=500)} for i in range(20)])
    monkeypatch.setattr(datasets, "load_dataset", hub)
    blocks = re.findall(r"```python\n(.*?)```", docs.read_text(), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "data.md", "exec"), {})
    assert "torch.Size([512])" in capsys.readouterr().out
    assert len(hub.calls) == 2


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12), length=st.integers(2, 16))
def test_rows_begin_with_documents(sizes, length):
    """Every document is there in full, and a row's first token is a document's or a long one's."""
    ends = np.cumsum(sizes)
    spans = np.stack([ends - sizes, ends], axis=1)
    aligned = begin_with_documents(spans, length).tolist()
    tokens = [token for start, stop in aligned for token in range(start, stop)]
    starts = set((ends - sizes).tolist())
    owner = np.repeat(np.arange(len(sizes)), sizes)
    for row in range(0, len(tokens), length):
        first = tokens[row]
        assert first in starts or sizes[owner[first]] >= length
    joined = ",".join(map(str, tokens)) + ","
    for start, stop in spans.tolist():
        assert ",".join(map(str, range(start, stop))) + "," in joined
