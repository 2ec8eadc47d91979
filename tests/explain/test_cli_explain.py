"""The explain command: costs, and two models or thresholds on one page."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

import kvprune
import model_folders
import traces
import zoo
from helpers import uneven_gates
from kvprune import PruneError
from kvprune.adapters.load import load_with_tokenizer
from kvprune.cli import app
from kvprune.explain import Trace
from kvprune.explain.against import read_again
from kvprune.explain.page.packing import unpack
from kvprune.explain.summary import over_pairs, summary

TEXT = "The cat sat on the mat, and then it slept; nobody said why."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """`model`, `adapter`, and `second`: another adapter of the same model."""
    path = model_folders.save(tmp_path_factory.mktemp("explain"))
    model = zoo.make("llama", vocab_size=257, max_position_embeddings=model_folders.POSITIONS)
    with kvprune.attach(model, kvprune.PruningConfig(rank=8)) as pruned:
        uneven_gates(pruned, seed=3)
        model.config.name_or_path = str(path / "model")
        pruned.save(path / "second")
    return path


def run(folder, *args, text=TEXT):
    command = ["explain", str(folder / "model"), text, "--adapter", str(folder / "adapter"), *args]
    return CliRunner().invoke(app, command)


def page_of(path):
    return json.loads(path.read_text().split('id="data">')[1].split("</script>")[0])


def record_steps(record):
    life = unpack(record["drop"])
    return np.where(life > 0, np.arange(life.shape[1]) + life, kvprune.NEVER)


def test_cost_is_measured_by_default(folder, tmp_path):
    page = tmp_path / "p.html"
    result = run(folder, "--out", str(page), "--json", "--misses", "2")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    trace = Trace.from_text(*pruned_and_tokenizer(folder, "adapter"), TEXT).with_misses(2)
    assert told["loss"] == pytest.approx(float(np.nanmean(trace.loss)), rel=1e-5)
    assert told["dense_loss"] == pytest.approx(float(np.nanmean(trace.dense_loss)), rel=1e-5)
    assert told["dense"] == "base model"
    assert [miss["token"] for miss in told["misses"]] == [miss.token for miss in trace.misses]
    assert told["misses"][0]["text"] == trace.tokens[trace.misses[0].token]
    assert told["adapter"] == "adapter"
    assert told["settings"]["threshold"] == 0.0
    assert told["sparsity"] != told["sparsity_over_pairs"]
    record = page_of(page)["records"][0]
    assert record["misses"][0]["token"] == trace.misses[0].token
    assert record["scores"]["rms"] < 0.1
    assert "measuring the loss" in result.stderr


def pruned_and_tokenizer(folder, adapter):
    loaded = load_with_tokenizer(str(folder / "model"), str(folder / adapter))
    return loaded.attached(), loaded.tokenizer


def test_no_cost(folder, tmp_path):
    page = tmp_path / "p.html"
    result = run(folder, "--out", str(page), "--no-cost")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip() == str(page)
    assert "loss" not in page_of(page)["records"][0]
    assert "of the earlier tokens are dropped at the end" in result.stderr
    assert "over all pairs" in result.stderr
    assert "measuring" not in result.stderr


def test_two_adapters(folder, tmp_path):
    page = tmp_path / "p.html"
    result = run(folder, "--out", str(page), "--no-cost", "--json",
                 "--against", str(folder / "second"))  # fmt: skip
    assert result.exit_code == 0, result.output
    records = page_of(page)["records"]
    assert [record["name"] for record in records] == ["adapter", "second"]
    for record in records:
        trace = Trace.from_text(*pruned_and_tokenizer(folder, record["name"]), TEXT)
        assert np.array_equal(record_steps(record), trace.drop_step)
    told = json.loads(result.stdout)
    assert told["against"]["adapter"] == "second"
    assert told["against"]["sparsity"] != told["sparsity"]


def test_two_thresholds(folder, tmp_path):
    page = tmp_path / "p.html"
    result = run(folder, "--out", str(page), "--no-cost", "--threshold", "-0.25",
                 "--against-threshold", "0.5")  # fmt: skip
    assert result.exit_code == 0, result.output
    records = page_of(page)["records"]
    assert [record["threshold"] for record in records] == [-0.25, 0.5]
    pruned, tokenizer = pruned_and_tokenizer(folder, "adapter")
    for record in records:
        pruned.adjust(threshold=record["threshold"])
        trace = Trace.from_text(pruned, tokenizer, TEXT)
        assert np.array_equal(record_steps(record), trace.drop_step)
    assert len(result.stderr.split("over all pairs")) == 3


def test_generated_tokens_are_read_by_both(folder, tmp_path):
    page = tmp_path / "p.html"
    result = run(folder, "--out", str(page), "--no-cost", "--write", "9",
                 "--against-threshold", "0.5")  # fmt: skip
    assert result.exit_code == 0, result.output
    data = page_of(page)
    T = len(data["tokens"])
    assert data["prompt"] == T - 9
    for record in data["records"]:
        steps = record_steps(record)
        assert (steps[steps < kvprune.NEVER] < T - 1).all()  # the last token was not read


def test_the_dense_model_has_no_threshold(folder, tmp_path):
    command = ["explain", str(folder / "model"), TEXT, "--out", str(tmp_path / "p.html")]
    result = CliRunner().invoke(app, [*command, "--against-threshold", "1", "--no-cost"])
    assert isinstance(result.exception, PruneError)
    assert "has no threshold" in str(result.exception)


def test_models_with_other_tokenizers_are_refused(folder):
    pruned, tokenizer = pruned_and_tokenizer(folder, "adapter")
    trace = Trace.from_text(pruned, tokenizer, TEXT)
    swapped = {letter: i for i, letter in enumerate(sorted(tokenizer.get_vocab(), reverse=True))}
    other = type(tokenizer)(tokenizer_object=_with_vocab(swapped), eos_token="<end>")
    with pytest.raises(PruneError, match="different tokenizers"):
        read_again(trace, pruned, other)


def _with_vocab(vocab):
    built = Tokenizer(models.BPE(vocab, [], unk_token=None))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    return built


def test_shares_of_a_summary_by_hand():
    trace = traces.random_trace(3, 40)
    pairs = [trace.drop_step[l, j] <= k for l in range(3) for k in range(40) for j in range(k)]
    assert over_pairs(trace) == pytest.approx(np.mean(pairs))
    assert over_pairs(traces.random_trace(1, 1)) == 0
    assert "loss" not in summary(trace)
