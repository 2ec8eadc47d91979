"""Key norm: the keys with the lowest norm stay, against plain loops."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvprune
import zoo
from helpers import random_ids
from kvprune import NEVER, KeyNormConfig, PrunedCache
from kvprune.methods import keynorm
from kvprune.methods.base import Reading
from kvprune.ops.timeline import make_timeline


def plain_steps(norms, budget):
    """After each token, over the budget, the one with the largest norm leaves: drop steps."""
    held, steps = [], {}
    for t in range(len(norms)):
        held.append(t)
        if len(held) > budget:
            # of equal norms the oldest
            leaves = max(held, key=lambda j: (norms[j], -j))
            held.remove(leaves)
            steps[leaves] = t + 1
    return [steps.get(j, NEVER) for j in range(len(norms))]


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(st.lists(st.integers(0, 6), min_size=20, max_size=20), min_size=1, max_size=3),
    pads=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    budget=st.integers(1, 9),
    split=st.integers(0, 19),
    block=st.sampled_from([1, 3, 256]),
)
def test_drop_steps_are_those_of_plain_loops(rows, pads, budget, split, block):
    """With equal norms, left padding, and a part of the text in the cache already."""
    B, T = len(rows), 20
    real = torch.arange(T) >= torch.tensor(pads[:B])[:, None]
    want = torch.full((B, T), NEVER)
    for b, row in enumerate(rows):
        alone = plain_steps(row[pads[b] :], budget)
        want[b, pads[b] :] = torch.tensor([s + pads[b] if s < NEVER else NEVER for s in alone])
        want[b, : pads[b]] = torch.arange(pads[b])
    norm = torch.tensor(rows).float()
    config = KeyNormConfig(budget)
    before, keynorm.BLOCK = keynorm.BLOCK, block
    try:
        timeline = make_timeline(real, (B, T), torch.device("cpu"))
        token = timeline.clock.long()
        query = torch.zeros(B, 1, T, 1)
        reading = Reading(timeline, token, query, None, None, None, {"norm": norm}, None)
        got = config.drop_steps(reading)
        assert torch.equal(got, want)
        # the first part in the cache, as it is after that part was read
        first = want[:, :split]
        there = real[:, :split] & (first > split)
        later = make_timeline(
            real[:, split:], (B, T - split), torch.device("cpu"), start=real[:, :split].sum(1)
        )
        later = later.after(token[:, :split], there, config.protection())
        reading = reading._replace(timeline=later, query=query[:, :, split:])
        rest = config.drop_steps(reading)
        shifted = (want - split).where(want < NEVER, NEVER)
        assert torch.equal(rest[:, :split][there], shifted[:, :split][there])
        assert torch.equal(rest[:, split:], shifted[:, split:])
    finally:
        keynorm.BLOCK = before


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_the_record_of_generation_is_that_of_one_pass(backend, chunk):
    model = zoo.make("llama")
    pruned = kvprune.attach(model, KeyNormConfig(budget=9))
    ids = random_ids(2, 40)
    cache = PrunedCache(pruned, record=True, backend=backend)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
        past_key_values=cache, prefill_chunk_size=chunk, return_dict_in_generate=True,
    )  # fmt: skip
    assert (cache.kept == 9).all()
    seen = out.sequences[:, :-1]
    # who leaves after the last token is not in its past
    last = cache.drop_step.where(cache.drop_step < seen.shape[1], NEVER)
    assert torch.equal(last, pruned.trace(seen))


def test_the_stored_norm_is_that_of_the_keys():
    model = zoo.make("llama")
    pruned = kvprune.attach(model, KeyNormConfig(budget=12))
    with torch.no_grad():
        cache = model(random_ids(2, 30)).past_key_values
    for store in cache.stores:
        table = store.table
        keys = table.get().keys.float()
        want = keys.norm(dim=-1).mean(1)
        got = table.column("norm")
        assert ((got - want).abs() <= want / 256).all()
    assert len(pruned.interactions) == 0
