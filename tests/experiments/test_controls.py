"""The controls of the experiments on what is forgotten, and the statements made of stored rows."""

import json
import math
from collections import Counter

import pytest
import torch

import zoo
from experiments import audit, context_switch, largest_batches, near_twins
from experiments.publish import DOCS
from helpers import attach_uneven, random_ids
from kvprune.evaluate.cost.formulas import cache_bytes
from kvprune.evaluate.cost.shape import read_shape
from kvprune.evaluate.points import Points
from kvprune.evaluate.reader import Reader
from kvprune.explain.nearest_keys import keys_of
from model_folders import byte_tokenizer


def halves(count: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    rows = {kind: random_ids(2 * count, 6, seed).tolist() for seed, kind in enumerate("abc")}
    return {kind: list(zip(r[:count], r[count:], strict=True)) for kind, r in rows.items()}


def test_conditions_differ_in_the_pairing_alone():
    n = 5
    pairs = context_switch.pairings(halves(n))
    kind = [i // n for i in range(3 * n)]
    for condition, chosen in pairs.items():
        # every first and every second half once
        assert sorted(i for i, _ in chosen) == sorted(j for _, j in chosen) == list(range(3 * n))
        own = [i == j for i, j in chosen]
        alike = [kind[i] == kind[j] for i, j in chosen]
        assert set(own) == {condition == context_switch.CONTINUED}
        assert set(alike) == {condition != context_switch.OTHER_KIND}


def test_pairs_across_are_those_that_the_masks_show():
    pruned = attach_uneven(zoo.make("llama"))
    ids = random_ids(3, 20)
    steps = pruned.trace(ids)  # (L, B, T)
    got = context_switch.across(Reader(pruned), ids)
    for b in range(3):
        for layer in range(len(steps)):
            seen = [int(steps[layer, b, j]) > k for k in range(10, 20) for j in range(10)]
            assert got[b][layer] == pytest.approx(sum(seen) / 100)
    assert 0.01 < sum(map(sum, got)) / sum(map(len, got)) < 0.95


def test_a_passage_is_cut_where_a_paragraph_ends(tmp_path):
    texts = ["one two three four\n\nfive six seven eight nine\n\nten", "too short\n\nfor two"]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    tokenizer = byte_tokenizer()
    found = list(context_switch.passages(str(tmp_path / "d.jsonl"), tokenizer, 15))
    assert [[tokenizer.decode(half) for half in pair] for pair in found] == [
        ["wo three four\n\n", "five six seven "]
    ]


def test_a_ratio_and_its_interval_per_layer(tmp_path):
    pruned = attach_uneven(zoo.make("llama"))
    seen = context_switch.measured(pruned, None, halves(4), Points(tmp_path / "p.json"))
    rows = context_switch.compared(seen)
    layers = len(pruned.layers)
    assert Counter(row["condition"] for row in rows) == dict.fromkeys(seen, layers + 1)
    for row in rows:
        column = slice(None) if row["layer"] == "all" else row["layer"]
        own = seen[row["condition"]][:, column].mean()
        assert row["seen"] == pytest.approx(own)
        if "ratio" in row:
            base = seen[context_switch.CONTINUED][:, column].mean()
            assert row["ratio"] == pytest.approx(own / base)
            assert row["low"] <= row["ratio"] <= row["high"]
    assert len(context_switch.verdicts([{"model": "m", **row} for row in rows])) == 2


def test_keys_without_rotation_are_those_of_the_projection():
    pruned = attach_uneven(zoo.make("llama"))
    ids = random_ids(1, 14)[0].tolist()
    projected = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda m, a, out: projected.append(out[0]))
        for layer in pruned.model.model.layers
    ]
    keys, _ = keys_of(pruned, ids)
    for hook in hooks:
        hook.remove()
    for rotated, plain in zip(keys, projected, strict=True):
        torch.testing.assert_close(near_twins.unrotated(pruned, rotated), plain.detach())
        assert not torch.allclose(rotated, plain, atol=1e-3)
    assert near_twins.unrotated(attach_uneven(zoo.make("gpt2")), keys[0]) is None


def test_twins_are_compared_by_means_over_texts():
    rows = near_twins.row(
        ("as stored", "all other tokens", 3), [(2.0, 4, 1.0, 1), (1.0, 2, 3.0, 3)]
    )
    assert rows["mean_dropped"] == 0.5
    assert rows["mean_kept"] == 1.0
    assert rows["ratio"] == rows["low"] == rows["high"] == 0.5


def test_the_audit_is_of_the_rows_that_are_stored():
    rows = [*audit.frozen(), *audit.temperature(), *audit.opening(), *audit.twins(),
            *audit.switch(), *audit.uneven()]  # fmt: skip
    assert json.loads((DOCS / "results/audit.json").read_text())["rows"] == rows
    frozen = [row for row in rows if row["about"] == "frozen base"]
    assert len(frozen) == 12
    assert all(row["frozen / its dense"] > row["all weights / theirs"] for row in frozen)
    assert audit.between([(0.0, 0.0), (0.5, 1.0), (1.0, 3.0)], 0.75) == 2.0
    assert math.isnan(audit.between([(0.0, 0.0), (0.5, 1.0)], 0.75))


def test_the_largest_batch_fits_and_one_more_does_not():
    shape = read_shape("gpt2-medium", "float16")
    rows = largest_batches.of_model("gpt2-medium")
    row = next(row for row in rows if (row["sparsity"], row["context"]) == (0.8, 1000))
    weights = 2 * shape.parameters
    one = cache_bytes(shape, 1000, 0.8, 1, 64, "most").total
    assert weights + row["batch"] * one <= 24e9 < weights + (row["batch"] + 1) * one
    assert {r["batch_ratio"] for r in rows if r["sparsity"] == 0} == {1.0}
