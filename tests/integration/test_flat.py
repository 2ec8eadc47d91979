"""A flat pass gives every text what it gets alone, whoever is beside it."""

import pytest
import torch

import zoo
from helpers import attach_uneven, random_ids
from kvprune import DenseConfig, H2OConfig, PrunedCache, PruneError, attach
from kvprune.cache.arena import Arena
from kvprune.cache.rows import take_over
from kvprune.integration.flat import Part, check_flat, flat_forward


@torch.inference_mode()
def alone(pruned, ids, chunks):
    """Logits after every chunk, and what each layer holds at the end."""
    cache, logits, start = PrunedCache(pruned), [], 0
    for T in chunks:
        out = pruned.model(ids[:, start : start + T], past_key_values=cache, use_cache=True)
        logits.append(out.logits[0, -1])
        start += T
    return torch.stack(logits), cache.kept[:, 0]


def flat(pruned, texts, plan):
    """The same in flat passes; plan: for each pass, tokens that each text reads (0: none)."""
    arena = Arena()
    caches = [PrunedCache(pruned, arena=arena) for _ in texts]
    read, logits = [0] * len(texts), [[] for _ in texts]
    for step in plan:
        own = [i for i, T in enumerate(step) if T]
        parts = [
            Part(caches[i], texts[i][:, read[i] : read[i] + step[i]], pruned.working) for i in own
        ]
        ends = torch.tensor([step[i] for i in own]).cumsum(0) - 1
        for i, row in zip(own, flat_forward(pruned, parts, ends), strict=True):
            logits[i].append(row)
            read[i] += step[i]
    return [torch.stack(rows) for rows in logits], [cache.kept[:, 0] for cache in caches]


PLAN = [(7, 0, 20), (5, 3, 1), (1, 9, 1), (1, 1, 4), (1, 1, 1)]


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "gpt_neox", "stablelm", "opt"])
def test_every_text_as_if_alone(family):
    pruned = attach_uneven(zoo.make(family))
    texts = [random_ids(1, sum(T), seed=i) for i, T in enumerate(zip(*PLAN, strict=True))]
    logits, kept = flat(pruned, texts, PLAN)
    for i, ids in enumerate(texts):
        chunks = [step[i] for step in PLAN if step[i]]
        want, held = alone(pruned, ids, chunks)
        assert kept[i].equal(held)
        assert held.sum() < 3 * ids.shape[1]  # something was dropped
        torch.testing.assert_close(logits[i], want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("config", [DenseConfig(), H2OConfig(budget=6)])
def test_every_method(config):
    pruned = attach(zoo.make("llama"), config)
    texts = [random_ids(1, sum(T), seed=i) for i, T in enumerate(zip(*PLAN, strict=True))]
    logits, kept = flat(pruned, texts, PLAN)
    for i, ids in enumerate(texts):
        want, held = alone(pruned, ids, [step[i] for step in PLAN if step[i]])
        assert kept[i].equal(held)
        torch.testing.assert_close(logits[i], want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"kv": "int8"}, {"record": True}])
def test_rows_that_were_taken_over_decode_together(options):
    pruned = attach_uneven(zoo.make("llama"))
    texts = [random_ids(1, n + 6, seed=n) for n in (12, 30, 5)]
    arena = Arena()

    def read(ids, n):
        cache = PrunedCache(pruned, arena=arena, **options)
        flat_forward(pruned, [Part(cache, ids[:, :n], pruned.working)], torch.tensor([n - 1]))
        return cache

    batch, want = PrunedCache(pruned, arena=arena, **options), []
    lengths = [ids.shape[1] - 6 for ids in texts]
    for i, (ids, n) in enumerate(zip(texts, lengths, strict=True)):
        before = [store.table.offsets() for store in batch.stores if store.table]
        own = read(ids, n)
        offsets = [store.table.offsets() for store in own.stores]
        assert take_over(batch, own) == [i]
        # nothing was moved, neither what came nor what was there
        after = [store.table.offsets() for store in batch.stores]
        assert after == [[*a, *b] for a, b in zip(before or [[]] * 3, offsets, strict=True)]
        alone = read(ids, n)
        last = torch.tensor([0])
        want.append(
            [
                flat_forward(pruned, [Part(alone, ids[:, t : t + 1], pruned.working)], last)
                for t in range(n, n + 6)
            ]
        )
    for t in range(6):
        ids = torch.cat([x[:, n + t : n + t + 1] for x, n in zip(texts, lengths, strict=True)])
        logits = flat_forward(pruned, [Part(batch, ids, pruned.working)], torch.arange(3))
        torch.testing.assert_close(logits, torch.cat([w[t] for w in want]), atol=2e-5, rtol=1e-4)
    assert batch.tokens.tolist() == [n + 6 for n in lengths]
    if "record" in options:
        assert batch.drop_step.shape == (3, 3, 36)
    batch.reset()
    del alone
    assert arena.used == 0


def test_models_that_cannot():
    with pytest.raises(PruneError, match=r"layer 0 .*and 1 more"):
        check_flat(attach_uneven(zoo.make("gemma2")))
    check_flat(attach_uneven(zoo.make("llama")))


def test_an_error_breaks_off_what_was_begun():
    pruned = attach_uneven(zoo.make("llama"))
    ids = random_ids(1, 8)
    filled, empty = PrunedCache(pruned), PrunedCache(pruned)
    flat_forward(pruned, [Part(filled, ids, pruned.working)], torch.tensor([7]))
    parts = [Part(cache, ids, pruned.working) for cache in (filled, empty)]
    handle = pruned.model.model.layers[2].mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        flat_forward(pruned, parts, torch.tensor([7]))
    handle.remove()
    assert (empty.seen, empty.whole, filled.whole) == (0, True, False)
    with pytest.raises(PruneError, match="broke off"):
        flat_forward(pruned, parts, torch.tensor([7]))


def fail(*_):
    raise RuntimeError("on purpose")
