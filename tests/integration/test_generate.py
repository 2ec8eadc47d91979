"""Generation with a pruned cache equals a full masked forward pass, token by token."""

import copy

import pytest
import torch
from torch.testing import assert_close

import kvprune
import zoo
from helpers import attach_uneven, full_logits, position_ids, random_ids
from kvprune import (
    DenseConfig,
    H2OConfig,
    KeyNormConfig,
    LocalConfig,
    PrunedCache,
    PruneError,
    StreamingConfig,
    StridedConfig,
    TovaConfig,
)

SHAPES = ["gpt2", "llama", "qwen3", "gpt_neox", "gemma2"]
PROMPT = 40
TOLERANCE = 5e-5
BACKENDS = ["cpu", "reference"]


def pruned_model(name, **options):
    model = zoo.make(name)
    return model, attach_uneven(model, **options)


def padded_batch():
    """Three prompts of 40, 33 and 25 tokens, padded on the left."""
    ids, mask = random_ids(3, PROMPT), torch.ones(3, PROMPT, dtype=torch.long)
    mask[1, :7], mask[2, :15] = 0, 0
    return ids, mask


def generate(model, ids, mask, **options):
    options = {"max_new_tokens": 60, "do_sample": False, **options}
    return model.generate(
        ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options
    )


def extend_mask(mask, length):
    return torch.cat([mask, mask.new_ones(len(mask), length - mask.shape[1])], 1)


def assert_exact(model, out, mask, tolerance=TOLERANCE):
    """The logits of every step equal those of a full forward pass over the result."""
    sequence = out.sequences
    want = full_logits(model, sequence, extend_mask(mask, sequence.shape[1]))
    got = torch.stack(out.logits, 1)
    assert_close(got, want[:, mask.shape[1] - 1 : -1], atol=tolerance, rtol=0)


def generate_exactly(name, config, backend, **options):
    """Generate for the padded batch with this method, check the logits; returns its cache too."""
    model = zoo.make(name)
    pruned = kvprune.attach(model, config)
    ids, mask = padded_batch()
    cache = PrunedCache(pruned, backend=backend)
    out = generate(model, ids, mask, past_key_values=cache, **options)
    assert out.past_key_values is cache
    assert_exact(model, out, mask)
    return pruned, cache


def assert_pruned(cache):
    kept = cache.kept.float()
    assert kept.shape[0] == len(cache.stores)
    assert (kept < 0.9 * cache.seen).any(), "nothing was dropped"
    assert len(kept) == 1 or kept.std(dim=0).max() > 0, "all layers dropped equally"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_greedy_with_a_padded_batch(name, backend):
    model, pruned = pruned_model(name)
    ids, mask = padded_batch()
    cache = PrunedCache(pruned, backend=backend)
    out = generate(model, ids, mask, max_new_tokens=200, past_key_values=cache)
    assert out.past_key_values is cache
    assert_exact(model, out, mask)
    assert_pruned(cache)
    assert cache.seen == PROMPT + 199


@pytest.mark.parametrize("name", [name for name in zoo.ZOO if name not in SHAPES])
def test_greedy_on_every_family(name):
    model, _ = pruned_model(name)
    ids, mask = padded_batch()
    out = generate(model, ids, mask, max_new_tokens=30)
    assert_exact(model, out, mask, tolerance=2e-3 if name == "qwen3_next" else 1e-4)
    assert_pruned(out.past_key_values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_padded_row_equals_the_row_alone(name, backend):
    model, pruned = pruned_model(name)
    ids, mask = padded_batch()
    batch = generate(model, ids, mask, past_key_values=PrunedCache(pruned, backend=backend))
    for row in range(3):
        real = mask[row].bool()
        alone = generate(model, ids[row : row + 1, real], mask[row : row + 1, real])
        assert torch.equal(batch.sequences[row, PROMPT:], alone.sequences[0, real.sum() :])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunked_prefill(name, chunk):
    model, _ = pruned_model(name)
    ids, mask = padded_batch()
    out = generate(model, ids, mask, prefill_chunk_size=chunk)
    assert_exact(model, out, mask)


@pytest.mark.parametrize("name", SHAPES)
def test_second_turn_with_the_returned_cache(name):
    model, _ = pruned_model(name)
    ids = random_ids(2, PROMPT)
    first = generate(model, ids, torch.ones_like(ids), max_new_tokens=20)
    turn = torch.cat([first.sequences, random_ids(2, 15, seed=5)], 1)
    mask = torch.ones_like(turn)
    cache = first.past_key_values
    second = generate(model, turn, mask, past_key_values=cache)
    assert second.past_key_values is cache
    assert_exact(model, second, mask)


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "gemma2"])
def test_right_padding(name):
    """Prompts padded on the right, then single tokens, against each row alone.

    Not Gemma 2: transformers counts pads in the windows of its sliding layers.
    """
    model, pruned = pruned_model(name)
    ids, mask = random_ids(3, PROMPT), torch.ones(3, PROMPT, dtype=torch.long)
    mask[1, 30:], mask[2, 12:] = 0, 0
    tail = random_ids(3, 25, seed=7)
    cache = PrunedCache(pruned)
    full_mask = torch.cat([mask, torch.ones_like(tail)], 1)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=cache)
        for t in range(25):
            seen = full_mask[:, : PROMPT + t + 1]
            got = model(
                tail[:, t : t + 1],
                attention_mask=seen,
                position_ids=position_ids(seen)[:, -1:],
                past_key_values=cache,
            ).logits[:, -1]
            for row in range(3):
                real = torch.cat([ids[row][mask[row].bool()], tail[row, : t + 1]])[None]
                if t % 6 == 0:
                    want = full_logits(model, real, torch.ones_like(real))[:, -1]
                    assert_close(got[row : row + 1], want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_beam_search(name, backend):
    """Beam search with and without the cache gives the same sequences."""
    model, pruned = pruned_model(name)
    ids, mask = padded_batch()
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 25, "do_sample": False}
    got = model.generate(
        ids, attention_mask=mask, past_key_values=PrunedCache(pruned, backend=backend), **options
    )
    want = model.generate(ids, attention_mask=mask, use_cache=False, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", SHAPES)
def test_sampling_and_several_sequences(name):
    model, _ = pruned_model(name)
    ids, mask = padded_batch()
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 30, "top_k": 0}
    torch.manual_seed(3)
    got = model.generate(ids, attention_mask=mask, **options)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, attention_mask=mask, use_cache=False, **options), got)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_rows_that_end_at_different_times(name):
    model, _ = pruned_model(name)
    ids, mask = padded_batch()
    plain = generate(model, ids, mask).sequences
    end = int(plain[1, PROMPT + 10])
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=60, do_sample=False, eos_token_id=end,
        pad_token_id=0,
    )  # fmt: skip
    for row in range(3):
        new = plain[row, PROMPT:].tolist()
        stop = new.index(end) + 1 if end in new else len(new)
        assert out[row, PROMPT : PROMPT + stop].tolist() == new[:stop]


@pytest.mark.parametrize("name", SHAPES)
def test_prompt_lookup_decoding(name):
    model, _ = pruned_model(name)
    # repetitive, so that some candidates are accepted and some are not
    ids = random_ids(1, 12).repeat(1, 4)
    mask = torch.ones_like(ids)
    options = {"max_new_tokens": 60, "do_sample": False}
    want = model.generate(ids, attention_mask=mask, **options)
    got = model.generate(ids, attention_mask=mask, prompt_lookup_num_tokens=5, **options)
    assert torch.equal(got, want)


@pytest.mark.parametrize("pruned_assistant", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_assisted_decoding(name, pruned_assistant):
    model, _ = pruned_model(name)
    assistant = zoo.make(name, seed=0)  # same weights without pruning: mostly right
    if pruned_assistant:
        attach_uneven(assistant, seed=4)
    ids = random_ids(1, 30)
    options = {"max_new_tokens": 50, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    want = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **options), want)


def test_crop_undoes_recorded_steps():
    model, pruned = pruned_model("llama")
    ids = random_ids(1, 60)
    cache = PrunedCache(pruned, record=True)
    with torch.no_grad():
        model(ids[:, :30], past_key_values=cache)
        with pytest.raises(PruneError, match="activate_past_recording"):
            cache.crop(-2)
        cache.activate_past_recording()
        model(random_ids(1, 9, seed=3), past_key_values=cache)
        model(random_ids(1, 1, seed=4), past_key_values=cache)
        cache.crop(-10)
        assert cache.seen == 30
        got = [model(ids[:, 30:45], past_key_values=cache).logits]
        cache.crop(0)
        got.append(model(ids[:, 45:], past_key_values=cache).logits)
        cache.crop(0)
    want = full_logits(model, ids, torch.ones_like(ids))[:, 30:]
    assert_close(torch.cat(got, 1), want, atol=TOLERANCE, rtol=0)
    assert torch.equal(cache.drop_step, pruned.trace(ids))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("depth_tied", [False, True])
@pytest.mark.parametrize("chunk", [None, 11])
def test_record_equals_the_trace(backend, depth_tied, chunk):
    model, pruned = pruned_model("llama", depth_tied=depth_tied, protect_first=1, protect_recent=2)
    ids = random_ids(2, PROMPT)
    cache = PrunedCache(pruned, record=True, backend=backend)
    mask = torch.ones_like(ids)
    out = generate(model, ids, mask, past_key_values=cache, prefill_chunk_size=chunk)
    assert_exact(model, out, mask)
    assert torch.equal(cache.drop_step, pruned.trace(out.sequences[:, :-1]))
    alive = (cache.drop_step == kvprune.NEVER).sum(-1)
    assert torch.equal(cache.kept, alive)


def test_record_follows_reordered_rows():
    model, pruned = pruned_model("llama")
    ids = random_ids(3, PROMPT)
    cache = PrunedCache(pruned, record=True)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    rows = torch.tensor([2, 0, 2])
    cache.reorder_cache(rows)
    assert torch.equal(cache.drop_step, pruned.trace(ids)[:, rows])
    cache.batch_repeat_interleave(2)
    assert torch.equal(cache.drop_step, pruned.trace(ids)[:, rows.repeat_interleave(2)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_half_precision(name, dtype):
    """Close, not exact: rounding depends on the order of summation."""
    model, _ = pruned_model(name)
    model.to(dtype)
    ids, mask = padded_batch()
    out = generate(model, ids, mask, max_new_tokens=20)
    assert out.past_key_values.stores[0].table.stored.dtype == dtype
    want = full_logits(model, out.sequences, extend_mask(mask, out.sequences.shape[1]))
    got = torch.stack(out.logits, 1)
    error = (got.float() - want[:, PROMPT - 1 : -1].float()).abs()
    assert error.median() < 0.05


@pytest.mark.parametrize(
    "config", [DenseConfig(), LocalConfig(9), StridedConfig(8), StreamingConfig(budget=9, sinks=2)]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_baselines(config, backend, name):
    _, cache = generate_exactly(name, config, backend)
    seen = cache.seen
    bound = {"dense": seen, "local": 9, "strided": seen // 8 + 8, "streaming": 9}[config.method]
    assert int(cache.kept.max()) <= bound
    assert config.method == "dense" or cache.nbytes < cache.dense_nbytes


def test_cache_created_in_inference_mode():
    model, _ = pruned_model("gpt2")
    ids, mask = padded_batch()
    with torch.inference_mode():
        out = generate(model, ids, mask, max_new_tokens=10)
    more = torch.cat([out.sequences, random_ids(3, 4)], 1)
    longer = extend_mask(mask, more.shape[1])
    again = generate(model, more, longer, past_key_values=out.past_key_values, max_new_tokens=10)
    assert_exact(model, again, longer)


def test_copied_cache_is_independent():
    model, _ = pruned_model("llama")
    ids = random_ids(2, PROMPT)
    out = generate(model, ids, torch.ones_like(ids), max_new_tokens=10)
    clone = copy.deepcopy(out.past_key_values)
    for cache, seed in ((out.past_key_values, 1), (clone, 2)):
        more = torch.cat([out.sequences, random_ids(2, 8, seed=seed)], 1)
        assert_exact(model, generate(model, more, torch.ones_like(more), past_key_values=cache),
                     torch.ones_like(more))  # fmt: skip
    assert clone.to("cpu") is clone


def test_streamers_and_scores():
    from transformers import TextStreamer

    class CollectingStreamer(TextStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append(None)

    model, _ = pruned_model("gpt2")
    ids = random_ids(1, 12)
    streamer = CollectingStreamer()
    out = model.generate(
        ids, max_new_tokens=8, do_sample=False, streamer=streamer, output_scores=True,
        return_dict_in_generate=True, attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    assert streamer.tokens == [*out.sequences[0].tolist(), None]
    assert len(out.scores) == 8


def test_cache_statistics():
    model, pruned = pruned_model("llama")
    ids, mask = padded_batch()
    cache = generate(model, ids, mask, max_new_tokens=30).past_key_values
    assert isinstance(cache, PrunedCache)
    assert cache.seen == PROMPT + 29
    assert cache.kept.shape == (3, 3)
    assert cache.dense_nbytes == 3 * 3 * 2 * 69 * 16 * 2 * 4
    chunks = cache.storage.arena.chunks
    assert cache.nbytes == sum(chunk.bytes.untyped_storage().nbytes() for chunk in chunks)
    assert 0.6 <= cache.load_factor <= 1
    # at the last position: the share of earlier tokens that are dropped
    earlier = torch.tensor([68, 61, 53]).sum()
    dropped = 1 - (cache.kept - 1).sum(1) / earlier
    assert_close(pruned.sparsity().per_layer, dropped.float())
    assert "pruned" in repr(cache).lower()


def test_forward_creates_and_continues_a_pruned_cache():
    from transformers import DynamicCache

    model, _ = pruned_model("llama")
    ids = random_ids(2, 50)
    with torch.no_grad():
        for given in ({}, {"past_key_values": DynamicCache()}):
            first = model(ids[:, :35], **given)
            assert isinstance(first.past_key_values, PrunedCache)
            second = model(ids[:, 35:], past_key_values=first.past_key_values)
            want = full_logits(model, ids, torch.ones_like(ids))
            got = torch.cat([first.logits, second.logits], 1)
            assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_gradients_flow_in_eval_mode():
    model, _ = pruned_model("llama")
    embeds = model.get_input_embeddings()(random_ids(1, 12)).detach().requires_grad_()
    model(inputs_embeds=embeds).logits.sum().backward()
    assert embeds.grad.abs().max() > 0


def test_unsupported_caches_and_modes_are_refused():
    from transformers import DynamicCache, StaticCache

    model, pruned = pruned_model("llama")
    ids = random_ids(1, 8)
    with pytest.raises(PruneError, match="generate_batch"):
        model.generate_batch([[1, 2, 3]])
    for kind in ("static", "offloaded", "quantized"):
        with pytest.raises(PruneError, match=kind):
            model.generate(ids, cache_implementation=kind)
    full = DynamicCache()
    full.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    static = StaticCache(config=model.config, max_cache_len=20)
    for cache in (full, static):
        with pytest.raises(PruneError, match=type(cache).__name__):
            model(ids, past_key_values=cache)
    other = PrunedCache(kvprune.attach(zoo.make("llama", num_hidden_layers=2)))
    with pytest.raises(PruneError, match="another model"):
        model.generate(ids, past_key_values=other)
    pruned.hard = False
    with pytest.raises(PruneError, match="soft"):
        model.generate(ids)
    with pytest.raises(PruneError, match="nothing was read"):
        _ = PrunedCache(pruned).kept
    with pytest.raises(PruneError, match="record=True"):
        _ = PrunedCache(pruned).drop_step


def test_detach_restores_generate():
    model, pruned = pruned_model("llama")
    ids = random_ids(1, 8)
    want = zoo.make("llama").generate(ids, max_new_tokens=5, do_sample=False)
    pruned.detach()
    out = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, want)
    assert not isinstance(out.past_key_values, PrunedCache)


def test_copied_model_generates_with_its_own_layers():
    model, _ = pruned_model("llama")
    clone = copy.deepcopy(model)
    ids = random_ids(1, 20)
    want = clone.generate(ids, max_new_tokens=10, do_sample=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(clone.generate(ids, max_new_tokens=10, do_sample=False), want)


@pytest.mark.parametrize(
    "config", [TovaConfig(budget=12), H2OConfig(budget=12), KeyNormConfig(budget=12)]
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_policies_hold_their_budget_and_are_exact(config, name, backend):
    pruned, cache = generate_exactly(name, config, backend, max_new_tokens=25)
    assert int(cache.kept.max()) == 12
    steps = pruned.trace(*padded_batch())
    assert steps.shape == (len(pruned.layers), 3, PROMPT)
    # the last token sees the budget and itself; the drop after it is not in the trace
    assert (steps[:, 0] == kvprune.NEVER).sum(-1).tolist() == [13] * len(pruned.layers)
    assert 0.2 < pruned.sparsity().total < 0.9


def policy_by_loops(config, logits):
    """TOVA and H2O as loops over the logits (T, T) of one head: which tokens each query sees."""
    T, held, score, seen = len(logits), [], {}, []
    for t in range(T):
        held.append(t)
        seen.append(list(held))
        weights = torch.softmax(logits[t, held], -1).tolist()
        for token, weight in zip(held, weights, strict=True):
            score[token] = score.get(token, 0.0) + weight
        if len(held) > config.budget:
            if isinstance(config, TovaConfig):
                held.pop(min(range(len(held)), key=weights.__getitem__))
            else:
                recent = config.budget - config.budget // 2
                old = [token for token in held if t - token >= recent]
                held.remove(min(old, key=score.__getitem__))
    return seen


@pytest.mark.parametrize("config", [TovaConfig(budget=5), H2OConfig(budget=6)])
def test_policies_against_loops(config):
    """One layer, one head: the trace equals that of the loops."""
    model = zoo.make("gpt2", n_layer=1, n_head=1)
    ids = random_ids(1, 30)
    inputs = {}
    attention = model.transformer.h[0].attn
    hook = attention.register_forward_pre_hook(lambda module, args: inputs.update(x=args[0]))
    with torch.no_grad():
        model(ids)
        q, k, _ = attention.c_attn(inputs["x"])[0].split(64, -1)
    hook.remove()
    seen = policy_by_loops(config, (q @ k.T) / 8)
    steps = kvprune.attach(model, config).trace(ids)[0, 0]
    for t, tokens in enumerate(seen):
        assert [j for j in range(t + 1) if t < steps[j]] == tokens


def test_policies_refuse_training_and_crop():
    model = zoo.make("llama")
    kvprune.attach(model, TovaConfig(budget=5))
    ids = random_ids(1, 12)
    with pytest.raises(PruneError, match="eval mode"):
        model.train()(ids)
    with pytest.raises(PruneError, match="take tokens back"):
        model.eval().generate(ids, prompt_lookup_num_tokens=3, max_new_tokens=5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_real_tokens_of_a_padded_batch(side):
    """A share of what was read counts no pads, however the rows move."""
    model = zoo.make("llama")
    pruned = kvprune.attach(model, kvprune.DenseConfig())
    lengths = torch.tensor([3, 7, 5])
    index = torch.arange(7)
    mask = index >= 7 - lengths[:, None] if side == "left" else index < lengths[:, None]
    cache = kvprune.PrunedCache(pruned)
    with pytest.raises(PruneError, match="nothing was read"):
        cache.tokens  # noqa: B018
    model(random_ids(3, 7), attention_mask=mask.long(), past_key_values=cache)
    assert cache.seen == 7
    assert cache.tokens.tolist() == [3, 7, 5]
    assert cache.kept.unique(dim=0).tolist() == [[3, 7, 5]]
    more = torch.cat([mask, torch.ones(3, 2, dtype=torch.bool)], 1).long()
    model(random_ids(3, 2), attention_mask=more, past_key_values=cache)
    assert cache.tokens.tolist() == [5, 9, 7]
    cache.reorder_cache(torch.tensor([2, 0, 1]))
    assert cache.tokens.tolist() == [7, 5, 9]
    cache.batch_repeat_interleave(2)
    assert cache.tokens.tolist() == [7, 7, 5, 5, 9, 9]
    cache.batch_select_indices(torch.tensor([4, 2]))
    assert cache.tokens.tolist() == [9, 5]
    assert (cache.kept == cache.tokens).all()
    cache.reset()
    model(random_ids(2, 4), past_key_values=cache)
    assert cache.tokens.tolist() == [4, 4]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_no_tokens_are_refused(name):
    model = zoo.make(name)
    pruned = kvprune.attach(model, kvprune.PruningConfig(rank=8))
    empty = torch.zeros(1, 0, dtype=torch.long)
    calls = [
        lambda: model(empty),
        lambda: model(empty, use_cache=False),
        lambda: model.base_model(input_ids=empty),
        lambda: model(inputs_embeds=torch.zeros(1, 0, model.config.hidden_size)),
        lambda: model.generate(empty, max_new_tokens=3, pad_token_id=0),
        lambda: pruned.trace([]),
    ]
    for call in calls:
        with pytest.raises(PruneError, match=r"has the shape \(1, 0.*there is no token to read"):
            call()
    assert model(random_ids(1, 3)).logits.shape[1] == 3
