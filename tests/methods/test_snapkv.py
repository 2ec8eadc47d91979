"""SnapKV: what the last tokens of a prompt looked at stays, against plain loops."""

import pytest
import torch
from torch.testing import assert_close

import kvprune
import zoo
from helpers import random_ids
from kvprune import NEVER, PrunedCache, PruneError, SnapKVConfig
from naive import masked_attention


def plain_choice(q, k, held, budget, window, kernel):
    """Which of the tokens `held`, in their order, stay; their last `window` ones vote.

    q: (Hq, T, D), k: (H, T, D), one row without padding.
    """
    groups, scaling, n = len(q) // len(k), q.shape[-1] ** -0.5, len(held)
    votes = [0.0] * n
    for h in range(len(q)):
        for t in range(n - window, n):
            logits = (k[h // groups, held[: t + 1]] @ q[h, held[t]]) * scaling
            for j, weight in enumerate(torch.softmax(logits, -1).tolist()):
                votes[j] += weight
    reach = kernel // 2
    padded = [0.0] * reach + votes + [0.0] * reach
    smooth = [sum(padded[j : j + kernel]) / kernel for j in range(n)]
    others = sorted(range(n - window), key=lambda j: -smooth[j])
    return sorted(held[j] for j in [*others[: budget - window], *range(n - window, n)])


def queries_and_keys(model, ids):
    """What attention is given in the only layer: (B, Hq, T, D), (B, H, T, D)."""
    seen = {}

    def look(name, q, k):
        seen["qk"] = q, k

    with masked_attention(model, {}, look), torch.no_grad():
        model(ids, use_cache=False)
    return seen["qk"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("kernel", [1, 5])
def test_the_choice_is_that_of_plain_loops(name, kernel):
    layers = {"n_layer": 1} if name == "gpt2" else {"num_hidden_layers": 1}
    model = zoo.make(name, **layers)
    ids = random_ids(2, 40)
    q, k = queries_and_keys(model, ids)
    pruned = kvprune.attach(model, SnapKVConfig(budget=12, window=4, kernel=kernel))
    cache = PrunedCache(pruned, record=True)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    for row in range(2):
        want = plain_choice(q[row], k[row], list(range(40)), 12, 4, kernel)
        slots = cache.stores[0].table.get()
        assert sorted(slots.token[row, slots.valid[row]].tolist()) == want
        # those that left, left with the first token after the prompt
        steps = cache.drop_step[0, row]
        assert [j for j in range(40) if steps[j] == NEVER] == want
        assert set(steps[steps < NEVER].tolist()) == {40}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_generation_sees_what_stayed_and_what_it_wrote(name, backend):
    model = zoo.make(name)
    pruned = kvprune.attach(model, SnapKVConfig(budget=12, window=4))
    ids = random_ids(2, 40)
    cache = PrunedCache(pruned, record=True, backend=backend)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=15, do_sample=False,
        past_key_values=cache, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert (cache.kept == 12 + 14).all()
    steps = {layer.name: cache.drop_step[layer.number] for layer in pruned.layers}
    pruned.detach()
    with masked_attention(model, steps), torch.no_grad():
        want = model(out.sequences[:, :-1], use_cache=False).logits[:, 39:]
    assert_close(torch.stack(out.logits, 1), want, atol=5e-5, rtol=0)


def test_a_padded_row_equals_the_row_alone():
    model = zoo.make("llama")
    kvprune.attach(model, SnapKVConfig(budget=10, window=3, kernel=3))
    ids, mask = random_ids(3, 40), torch.ones(3, 40, dtype=torch.long)
    mask[1, :7], mask[2, :15] = 0, 0
    options = {"max_new_tokens": 20, "do_sample": False}
    batch = model.generate(ids, attention_mask=mask, **options)
    for row in range(3):
        real = mask[row].bool()
        one = ids[row : row + 1, real]
        alone = model.generate(one, attention_mask=torch.ones_like(one), **options)
        assert torch.equal(batch[row, 40:], alone[0, int(real.sum()) :])


def test_later_prompts_are_cut_to_the_budget_too():
    """What stayed of the prompts before is in slots of any order by then."""
    model = zoo.make("gpt2", n_layer=1)
    ids = random_ids(1, 72)
    q, k = queries_and_keys(model, ids)
    cache = PrunedCache(kvprune.attach(model, SnapKVConfig(budget=16, window=3, kernel=3)))
    want: list[int] = []
    scrambled = 0
    with torch.no_grad():
        for start in range(0, 72, 8):
            model(ids[:, start : start + 8], past_key_values=cache)
            want = plain_choice(q[0], k[0], [*want, *range(start, start + 8)], 16, 3, 3)
            slots = cache.stores[0].table.get()
            tokens = slots.token[0, slots.valid[0]].tolist()
            assert sorted(tokens) == want
            scrambled += tokens != want
    assert scrambled >= 3


def test_a_short_prompt_stays_whole():
    model = zoo.make("gpt2")
    pruned = kvprune.attach(model, SnapKVConfig(budget=40))
    with torch.no_grad():
        out = model(random_ids(2, 30))
    assert (out.past_key_values.kept == 30).all()
    assert pruned.sparsity().total == 0


def test_settings_that_cannot_be():
    with pytest.raises(PruneError, match="budget=32 must be a whole number, 33 or more"):
        SnapKVConfig(budget=32)
    with pytest.raises(PruneError, match="kernel=4 must be odd"):
        SnapKVConfig(budget=64, kernel=4)
    model = zoo.make("llama")
    kvprune.attach(model, SnapKVConfig(budget=5, window=2))
    with pytest.raises(PruneError, match="take tokens back"):
        model.generate(random_ids(1, 12), prompt_lookup_num_tokens=3, max_new_tokens=5)
