"""A timed step is what generate does; reported times are those of the clock."""

import statistics

import pytest
import torch
from transformers import DynamicCache

import kvprune
import zoo
from helpers import random_ids, uneven_gates
from kvprune import PruneError
from kvprune.adapters import lora
from kvprune.adapters.pretrained import load_base
from kvprune.cache.nbytes import nbytes
from kvprune.evaluate.compare.results import best
from kvprune.evaluate.points import Points
from kvprune.evaluate.throughput import run as throughput
from kvprune.evaluate.throughput import timing
from kvprune.evaluate.throughput.budgets import BASELINES, budgeted
from kvprune.evaluate.throughput.contestants import ideal, realistic, rows_of
from kvprune.evaluate.throughput.decoding import dense_cache, filled_cache, stepper
from kvprune.evaluate.throughput.models import ModelPair, load_pair
from kvprune.evaluate.throughput.rigged import steady_votes
from kvprune.evaluate.throughput.run import Sweep, default_contexts, settings
from kvprune.integration.row_lora import twin

NOTHING_FITS = 1


def llama_pair(with_pruned: bool = True) -> ModelPair:
    dense = zoo.make("llama")
    if not with_pruned:
        return ModelPair(dense, None, None)
    pruned = kvprune.attach(twin(dense), kvprune.PruningConfig(rank=8))
    uneven_gates(pruned)
    return ModelPair(dense, pruned, random_ids(1, 400)[0])


def test_a_twin_shares_only_the_weights():
    model = zoo.make("gpt2")
    ids = random_ids(1, 12)
    other = twin(model)
    before = model(ids).logits
    kvprune.attach(other, kvprune.LocalConfig(2))
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.data_ptr() == b.data_ptr()
    assert torch.equal(model(ids).logits, before)
    assert not torch.equal(other(ids).logits, before)


@pytest.mark.parametrize("attached", [False, True])
def test_a_timed_step_is_what_generate_does(attached):
    model, ids = zoo.make("llama"), random_ids(2, 20)
    cache = DynamicCache(config=model.config)
    if attached:
        pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
        uneven_gates(pruned)
        cache = kvprune.PrunedCache(pruned)
    want = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    with torch.inference_mode():
        first = model(ids, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
    run = stepper(model, cache, 2, steps=3, start=first)
    run()
    run()
    assert cache.get_seq_length() == 26 == want.past_key_values.get_seq_length()
    if attached:
        assert torch.equal(cache.kept, want.past_key_values.kept)
        keys = [c.stores[-1].table.get().keys for c in (cache, want.past_key_values)]
    else:
        keys = [c.layers[-1].keys for c in (cache, want.past_key_values)]
    torch.testing.assert_close(*keys)


def test_a_filled_cache_holds_the_given_counts():
    pruned = kvprune.attach(zoo.make("deepseek_v3"), kvprune.PruningConfig(rank=8))
    kept = torch.tensor([[3, 7], [5, 5], [9, 1]])
    cache = filled_cache(pruned, 50, kept)
    assert torch.equal(cache.kept, kept)
    assert cache.seen == 50
    stepper(pruned.model, cache, 2, steps=1)()
    assert cache.seen == 51


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_bytes_of_a_dense_cache(kind):
    model = zoo.make("llama")
    cache = dense_cache(kind, model, batch=3, context=10, room=6)
    tokens = 10 if kind == "dynamic" else 16
    assert nbytes(cache) == 3 * 3 * tokens * 2 * 2 * 16 * 4
    assert int(cache.get_seq_length()) == 10


def test_an_unknown_kind_of_cache():
    with pytest.raises(PruneError, match="'paged' is unknown; choose dynamic or static"):
        dense_cache("paged", zoo.make("llama"), 1, 1)


def test_steady_votes_drop_about_one_token_per_step():
    model = zoo.make("gpt2")
    for norm in (block.ln_1 for block in model.transformer.h):
        norm.weight.data.mul_(3)  # the scale of a layer's input is measured, not guessed
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    torch.manual_seed(0)
    steady_votes(pruned, random_ids(2, 30), kept=50)
    cache = filled_cache(pruned, 300, torch.full((3, 40), 50))
    stepper(model, cache, 40, steps=6)()
    # 120 rows: 6 tokens entered, and about as many were dropped
    assert 45 < cache.kept.float().mean() < 56


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_holds_its_budget(name):
    context, kept = 60, 15
    config = budgeted(name, kept, context)
    contestant = next(c for c in ideal(llama_pair(False), context, 0.75, (name,)) if c.name == name)
    cache = contestant.cache(2, context, 0)
    expected = kept
    if name in ("local", "strided", "streaming"):
        every = torch.arange(context)
        expected = int((config.drop_position(every) >= context).sum())
    assert (cache.kept == expected).all()
    # a block pattern varies; its mean over a block is the budget
    steps, held = 12, []
    for _ in range(steps):
        stepper(contestant.model, cache, 2, steps=1)()
        held.append(float(cache.kept.float().mean()))
    if name == "snapkv":  # it drops at the end of a prompt, never while decoding
        assert held == [kept + step for step in range(1, steps + 1)]
    else:
        assert abs(statistics.mean(held) - kept) <= 1


def test_rows_are_spread_over_the_text():
    text = torch.arange(100)
    rows = rows_of(text, 4, 10)
    assert rows[:, 0].tolist() == [0, 30, 60, 90]
    assert rows[3].tolist() == list(range(90, 100))
    assert rows_of(text, 1, 100).shape == (1, 100)
    with pytest.raises(PruneError, match="text has 100 tokens, but the context is to be 101"):
        rows_of(text, 1, 101)


def test_realistic_rows_hold_what_the_model_kept():
    models = llama_pair()
    contestant = next(c for c in realistic(models) if c.name == "pruned")
    cache = contestant.cache(3, 80, 0)
    # the last token's votes have been applied
    steps = models.pruned.trace(rows_of(models.text, 3, 80))
    assert torch.equal(cache.kept, (steps > 79).sum(-1))
    assert cache.kept.float().std() > 0


@pytest.mark.parametrize("with_lora", [False, True])
def test_the_dense_model_stays_dense(tmp_path, with_lora):
    base = load_base("tiny")
    ids = random_ids(1, 8)
    want = base(ids).logits
    if with_lora:
        lora.add(base, rank=2, alpha=4.0)
        with torch.no_grad():
            for name, weight in base.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
    kvprune.attach(base, kvprune.PruningConfig(rank=4)).save(tmp_path)
    pair = load_pair("tiny", str(tmp_path))
    assert torch.equal(pair.dense(ids).logits, want)
    shared = pair.dense.lm_head.weight.data_ptr() == pair.pruned.model.lm_head.weight.data_ptr()
    # a merged LoRA changes weights, so they are not shared
    assert shared != with_lora
    changed = [
        not torch.equal(a, b)
        for (_, a), (_, b) in zip(
            pair.dense.transformer.h.named_parameters(),
            ((n, p) for n, p in pair.pruned.model.transformer.h.named_parameters()
             if "interaction" not in n),
            strict=True,
        )
    ]  # fmt: skip
    assert any(changed) == with_lora
    assert len(pair.text) > 10_000


def test_random_weights_take_no_adapter():
    with pytest.raises(PruneError, match="random weights have no adapter"):
        load_pair("tiny", "adapter", random=True)
    pair = load_pair("tiny", random=True, dtype="bfloat16")
    assert pair.pruned is None
    assert pair.dense.dtype == torch.bfloat16


def test_text_that_cannot_be_read(tmp_path):
    kvprune.attach(load_base("tiny"), kvprune.PruningConfig(rank=4)).save(tmp_path)
    with pytest.raises(PruneError, match=r"cannot read text from .*nowhere.txt"):
        load_pair("tiny", str(tmp_path), tmp_path / "nowhere.txt")


def seconds_of(calls) -> dict[str, list[float]]:
    """Fake times: dense takes 4 seconds or more, the others 2."""
    return {
        name: [4.0, 6.0, 5.0] if name.startswith("dense") else [2.0, 2.0, 2.0] for name in calls
    }


@pytest.fixture
def clock(monkeypatch):
    timed = []

    def interleave(repeats, calls, warmup=1):
        timed.append(list(calls))
        return seconds_of(calls)

    monkeypatch.setattr(throughput, "interleave", interleave)
    return timed


def test_a_sweep_and_its_rows(clock, tmp_path):
    sweep = Sweep((24, 80), (1, 4), (0.5,), ("local",), static=True, steps=2, repeats=3, rank=8)
    models = llama_pair()
    points = Points(tmp_path / "points.json")
    rows = throughput.throughput(models, sweep, points)
    assert len(clock) == len(settings(models, sweep)) == 2 * 2 * 2
    assert clock[0] == ["dense", "dense, static", "pruned"]
    assert clock[2] == ["dense", "dense, static", "pruned", "local"]
    row = next(r for r in rows if (r["side"], r["batch"], r["rows"]) == ("pruned", 4, "ideal"))
    assert row["seconds_step"] == 2.0 / 2
    assert row["tokens_per_second"] == 4 / 1.0
    assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (2.5, 2.0, 3.0)
    assert row["sparsity"] == pytest.approx(0.5)
    dense = next(r for r in rows if (r["side"], r["batch"], r["context"]) == ("dense", 4, 80))
    assert dense["ratio"] == 1.0
    assert dense["sparsity"] == 0.0
    assert dense["cache_bytes"] == 3 * 4 * 80 * 2 * 2 * 16 * 4
    # measured once: a second run reads the file
    again = throughput.throughput(models, sweep, Points(tmp_path / "points.json"))
    assert again == rows
    assert len(clock) == 8


def test_real_times():
    sweep = Sweep((16,), (2,), (0.5,), steps=1, repeats=2, rank=8)
    rows = throughput.throughput(llama_pair(), sweep, Points(None))
    assert {(row["rows"], row["side"]) for row in rows} == {
        ("realistic", "dense"), ("realistic", "pruned"), ("ideal", "dense"), ("ideal", "pruned"),
    }  # fmt: skip
    for row in rows:
        assert 0 < row["seconds_step_low"] <= row["seconds_step"] <= row["seconds_step_high"]


def test_a_contestant_that_does_not_fit_is_left_out(clock):
    models = llama_pair()
    row_bytes = 3 * 80 * 2 * 2 * 16 * 4  # of the dense cache
    sweep = Sweep((80,), (2, 3, 4), (0.9,), memory=models.weight_bytes + 3 * row_bytes, rank=8)
    rows = throughput.throughput(models, sweep, Points(None))
    sides = {(r["rows"], r["batch"]): [] for r in rows}
    for row in rows:
        sides[row["rows"], row["batch"]].append(row["side"])
    assert sides["ideal", 3] == ["dense", "pruned"]
    assert sides["ideal", 4] == ["pruned"]
    assert next(r for r in rows if r["batch"] == 4 and r["rows"] == "ideal")["ratio"] is None
    # each at its best batch: pruned may use one that dense cannot
    best_rows = {(r["rows"], r["side"]): r for r in best(rows)}
    assert best_rows["ideal", "dense"]["batch"] == 3
    assert best_rows["ideal", "pruned"]["batch"] == 4
    speeds = [best_rows["ideal", side]["tokens_per_second"] for side in ("pruned", "dense")]
    assert best_rows["ideal", "pruned"]["best_ratio"] == speeds[0] / speeds[1]


def test_larger_batches_are_skipped_when_nothing_fits(clock):
    sweep = Sweep((80,), (1, 2), (0.9,), memory=NOTHING_FITS, rank=8)
    rows = throughput.throughput(llama_pair(False), sweep, Points(None))
    assert {row["batch"] for row in rows} == {1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": (500,)}, r"500 and 24 tokens to decode need 524 positions, .* has 512"),
        ({"batches": (0,)}, r"batches=\(0,\) must be 1 or more"),
        ({"baselines": ("oracle",)}, "baseline 'oracle' is unknown; choose from local"),
        ({"sparsities": ()}, "nothing to compare with dense"),
    ],
)
def test_errors(change, message):
    sweep = Sweep(**{"contexts": (20,), "batches": (1,), **change})
    with pytest.raises(PruneError, match=message):
        throughput.throughput(llama_pair(False), sweep, Points(None))


def test_default_contexts_fit_the_model():
    assert default_contexts(llama_pair(False), room=12) == (62, 125, 250, 500)
    assert default_contexts(llama_pair(False), room=12, most=80) == (10, 20, 40, 80)


def test_interleaved_calls_take_turns():
    order = []
    seconds = timing.interleave(2, {n: lambda n=n: order.append(n) for n in "ab"}, warmup=1)
    assert order == list("ab" * 3)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}


def test_ratios_compare_within_a_round():
    slow, fast = [2.0, 30.0, 4.0], [1.0, 10.0, 1.0]
    assert timing.ratios(slow, fast) == [2.0, 3.0, 4.0]
    assert timing.ratio(slow, fast) == 3.0


def test_spread():
    assert timing.spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    values = [float(x) for x in range(1, 10)]
    assert timing.spread(values) == (statistics.median(values), 3.0, 7.0)


def test_machine_and_versions():
    assert timing.machine()["cores"] >= 1
    assert timing.versions()["torch"] == torch.__version__
