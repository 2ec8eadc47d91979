"""`generate` reads a large batch in groups: the same tokens and survivors as read at once."""

import pytest
import torch

import kvprune
import zoo
from helpers import attach_uneven, random_ids
from kvprune.errors import BudgetError
from kvprune.integration import reading


def padded(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = random_ids(rows, length)
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : (3 * row) % (length - 2)] = 0
    return ids, mask


def generate(pruned, ids, mask, cache, **options):
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return pruned.generate(
        ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True,
        **{**settings, **options},
    )  # fmt: skip


def count_passes(pruned) -> list[int]:
    """Rows of each forward pass from now on."""
    rows: list[int] = []
    pruned.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize(
    "storage",
    [{}, {"store": "slots"}, {"kv": "int8"}, {"record": True}],
    ids=["extents", "slots", "int8", "record"],
)
def test_groups_equal_the_whole(storage, monkeypatch):
    pruned = attach_uneven(zoo.make("llama").eval())
    ids, mask = padded(7, 12)
    whole = kvprune.PrunedCache(pruned, **storage)
    want = generate(pruned, ids, mask, whole)
    monkeypatch.setattr(reading, "GROUP", 2 * 12)
    rows = count_passes(pruned)
    parts = kvprune.PrunedCache(pruned, **storage)
    got = generate(pruned, ids, mask, parts)
    assert rows[:5] == [2, 2, 2, 1, 7]
    assert torch.equal(got.sequences, want.sequences)
    assert got.past_key_values is parts
    assert (parts.seen, parts.tokens.tolist()) == (whole.seen, whole.tokens.tolist())
    assert torch.equal(parts.kept, whole.kept)
    if "record" in storage:
        assert torch.equal(parts.drop_step, whole.drop_step)


def test_every_row_padded(monkeypatch):
    """As a batch that is padded to a multiple: positions count the pads."""
    pruned = attach_uneven(zoo.make("gpt2").eval())
    ids, mask = padded(3, 12)
    mask[:, :2] = 0
    want = generate(pruned, ids, mask, kvprune.PrunedCache(pruned))
    monkeypatch.setattr(reading, "GROUP", 12)
    got = generate(pruned, ids, mask, kvprune.PrunedCache(pruned))
    assert torch.equal(got.sequences, want.sequences)
    assert got.past_key_values.seen == want.past_key_values.seen


def test_beams_and_a_method_without_weights(monkeypatch):
    pruned = kvprune.attach(zoo.make("llama").eval(), kvprune.StreamingConfig(budget=5, sinks=1))
    ids, mask = padded(3, 12)
    want = generate(pruned, ids, mask, None, num_beams=2)
    monkeypatch.setattr(reading, "GROUP", 12)
    assert torch.equal(generate(pruned, ids, mask, None, num_beams=2).sequences, want.sequences)


@pytest.mark.parametrize("why", ["recorder", "window", "hidden states", "second turn"])
def test_read_at_once_where_groups_cannot(why, monkeypatch):
    monkeypatch.setattr(reading, "GROUP", 12)
    pruned = attach_uneven(zoo.make("gemma2" if why == "window" else "llama").eval())
    ids, mask = random_ids(3, 12), torch.ones(3, 12, dtype=torch.long)
    recorder = (lambda *_: None) if why == "recorder" else None
    cache = kvprune.PrunedCache(pruned, recorder=recorder)
    options = {"output_hidden_states": True} if why == "hidden states" else {}
    if why == "second turn":
        with torch.no_grad():
            pruned.model(ids[:, :5], past_key_values=cache)
    rows = count_passes(pruned)
    generate(pruned, ids, mask, cache, **options)
    assert rows[0] == 3


def test_a_budget_that_is_met_half_way_leaves_nothing(monkeypatch):
    pruned = attach_uneven(zoo.make("llama").eval())
    ids, mask = random_ids(6, 40), torch.ones(6, 40, dtype=torch.long)
    monkeypatch.setattr(reading, "GROUP", 40)
    need = generate(pruned, ids, mask, kvprune.PrunedCache(pruned)).past_key_values.nbytes
    cache = kvprune.PrunedCache(pruned, budget=need // 2)
    with pytest.raises(BudgetError):
        generate(pruned, ids, mask, cache)
    assert (cache.seen, cache.storage.arena.used) == (0, 0)
    assert generate(pruned, ids[:1], mask[:1], cache).sequences.shape == (1, 46)
