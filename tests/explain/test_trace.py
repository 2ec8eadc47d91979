"""Traces against the cache, the masked forward pass and plain loops."""

import json

import numpy as np
import pandas
import pytest
import torch

import kvprune
import traces
from kvprune import NEVER, PruneError
from kvprune.explain import Trace
from kvprune.explain.token_text import KINDS, token_kind, token_texts

SPLIT = "naïve 😀 — שלום, 世界! 👩‍👩‍👧"


@pytest.fixture(scope="module")
def tok():
    return traces.tokenizer()


@pytest.fixture(autouse=True)
def _restore_end_token(tok):
    before = tok.eos_token_id
    yield
    tok.eos_token_id = before


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("options", [{}, {"depth_tied": True}, {"protect_recent": 3}])
def test_trace_of_text_equals_masked_forward_pass(tok, family, options):
    pruned = traces.pruned_model(family, **options)
    trace = Trace.from_text(pruned, tok, traces.TEXT)
    assert trace.text == traces.TEXT
    want = pruned.trace(tok(traces.TEXT).input_ids)[:, 0].numpy()
    assert (want < NEVER).any()
    assert np.array_equal(trace.drop_step, want)


@pytest.mark.parametrize("config", [kvprune.LocalConfig(4), kvprune.TovaConfig(9)])
def test_trace_of_baselines(tok, config):
    pruned = kvprune.attach(traces.zoo.make("gpt2", vocab_size=traces.VOCAB), config)
    trace = Trace.from_text(pruned, tok, traces.TEXT)
    want = pruned.trace(list(trace.ids))[:, 0].numpy()
    assert np.array_equal(trace.drop_step, np.where(want < len(trace.ids), want, NEVER))


def test_trace_of_generation_equals_cache_at_every_step(tok):
    """The tokens in the cache at every step and row are those that the trace keeps."""
    pruned, held = traces.pruned_model("llama"), []

    def watch(ids, scores):
        slots = [store.table.get() for store in cache.stores]
        rows = range(len(ids))
        held.append([[set(s.token[b][s.valid[b]].tolist()) for s in slots] for b in rows])
        return scores

    texts = [traces.TEXT, "Once upon a time", "A"]
    tok.pad_token = tok.eos_token
    inputs = tok(texts, return_tensors="pt", padding=True, padding_side="left")
    cache = kvprune.PrunedCache(pruned, record=True)
    out = pruned.model.generate(
        **inputs, max_new_tokens=30, do_sample=False, past_key_values=cache, pad_token_id=0,
        return_dict_in_generate=True, logits_processor=[watch],
    )  # fmt: skip
    row_traces = Trace.from_generate(out, tok, inputs.input_ids, inputs.attention_mask)
    for row, trace in enumerate(row_traces):
        assert trace.prompt == int(inputs.attention_mask[row].sum())
        assert trace.text == texts[row] + tok.decode(
            out.sequences[row, inputs.input_ids.shape[1] :]
        )
        for number, rows in enumerate(held):
            read = trace.prompt + number
            for layer, tokens in enumerate(rows[row]):
                step = trace.drop_step[layer, :read]
                assert tokens == {j for j, i in enumerate(step.tolist()) if i >= read}
    assert (row_traces[0].drop_step < NEVER).any()


def test_row_ends_at_its_end_token(tok):
    pruned = traces.pruned_model()
    free, inputs = traces.generate_batch(pruned, tok, [traces.TEXT, "Why"])
    length = inputs.input_ids.shape[1]
    # a token that the second row generates early
    end = int(free.sequences[1, length + 4])
    first = free.sequences[1, length:].tolist().index(end) + 1
    tok.eos_token_id = end
    out, inputs = traces.generate_batch(pruned, tok, [traces.TEXT, "Why"], eos_token_id=end)
    trace = Trace.from_generate(out, tok, inputs.input_ids, inputs.attention_mask)[1]
    assert len(trace.ids) == trace.prompt + first
    want = pruned.trace(list(trace.ids))[:, 0]
    # the end token was processed, since the other row continued
    assert np.array_equal(trace.drop_step, want.numpy())


def test_beams_are_refused(tok):
    pruned = traces.pruned_model()
    out, inputs = traces.generate_batch(pruned, tok, ["Why"], new=3, num_beams=2)
    with pytest.raises(PruneError, match="from_ids"):
        Trace.from_generate(out, tok, inputs.input_ids)


def test_kept_sparsity_and_mask_against_loops():
    trace = traces.random_trace(3, 40)
    for l, step in enumerate(trace.drop_step.tolist()):
        mask = trace.visible(l)
        for k in range(40):
            sees = [j for j in range(40) if j <= k < step[j]]
            assert np.nonzero(mask[k])[0].tolist() == sees
            assert trace.kept[l, k] == len(sees)
            gone = k + 1 - len(sees)
            assert trace.sparsity[l, k] == pytest.approx(gone / k if k else 0)
            assert trace.dropped_by(k, l) == [j for j in range(40) if step[j] == k]


def test_bytes_equal_those_of_the_cache(tok):
    pruned = traces.pruned_model("llama")
    cache = kvprune.PrunedCache(pruned)
    ids = torch.tensor([tok(traces.TEXT).input_ids])
    pruned.model(ids, past_key_values=cache)
    trace = Trace.from_text(pruned, tok, traces.TEXT)
    T = ids.shape[1]
    assert len(trace.layers) * T * trace.dense_bytes == cache.dense_nbytes
    slots = sum(int(store.table.capacity.sum()) for store in cache.stores)
    # an extent is a multiple of 64 bytes
    assert 0 <= cache.nbytes - slots * trace.kept_bytes < 64 * len(trace.layers)


@pytest.mark.parametrize("name", ["t.json", "t.npz"])
def test_save_and_load(tmp_path, name):
    tokens = ("</script>", "\u2028", "", "😀", "\n")
    trace = traces.random_trace(2, 5, tokens=tokens)
    again = Trace.load(trace.save(tmp_path / "new" / name))
    assert np.array_equal(again.drop_step, trace.drop_step)
    assert again.drop_step.dtype == np.int32
    assert again.to_dict() == trace.to_dict()
    assert again.tokens == tokens
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / name]


def test_loading_a_damaged_file_names_it(tmp_path):
    with pytest.raises(PruneError, match="does not exist"):
        Trace.load(tmp_path / "none.json")
    with pytest.raises(PruneError, match=r"\.json nor in \.npz"):
        traces.random_trace(1, 2).save(tmp_path / "t.txt")
    for name, text, message in [
        ("a.json", "{", "a.json"), ("b.npz", "x", "b.npz"), ("c.json", "[1]", "c.json"),
        ("d.json", "{}", "format 1"),
    ]:  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(PruneError, match=message):
            Trace.load(tmp_path / name)
    values = traces.random_trace(2, 5).to_dict()
    for change, message in [
        ({"drop_step": [[1, 2, 3, 4, -1]]}, "shape"),
        ({"drop_step": [[0, 2, 3, 4, -1], [-1] * 5]}, "only a later token"),
        ({"tokens": [], "ids": [], "drop_step": [[], []]}, "no tokens"),
        ({"more": 1}, "damaged"),
    ]:
        (tmp_path / "e.json").write_text(json.dumps(values | change))
        with pytest.raises(PruneError, match=message):
            Trace.load(tmp_path / "e.json")


def test_to_pandas():
    trace = traces.random_trace(2, 12)
    table = trace.to_pandas()
    assert len(table) == 24
    for row in table.itertuples():
        step = trace.drop_step[row.layer, row.position]
        assert row.token == trace.tokens[row.position]
        assert row.written == (row.position >= trace.prompt)
        if step == NEVER:
            assert row.drop_step is pandas.NA
        else:
            assert row.drop_step == step
            assert row.dropper == trace.tokens[step]


def test_texts_of_tokens_that_split_a_character(tok):
    ids = tok(SPLIT).input_ids
    texts = token_texts(tok, ids)
    assert "".join(texts) == SPLIT
    assert "" in texts
    assert "😀" in texts
    assert not any("�" in text for text in texts)
    # a text that ends within a character shows it
    cut = ids[: texts.index("😀")]
    assert "".join(token_texts(tok, cut)).endswith("�")


def test_token_kinds():
    want = {
        ",": "punctuation", ' "': "punctuation", "...": "punctuation", "\n": "line break",
        " the": "word", "ing": "part of a word", " 12": "number", "<|endoftext|>": "other",
        "": "other", " ": "other", "€": "punctuation", "</s>": "other", "<": "punctuation",
        "שלום": "part of a word",
    }  # fmt: skip
    assert {token: token_kind(token) for token in want} == want
    assert set(want.values()) == set(KINDS)


def test_empty_short_and_too_long_texts(tok):
    pruned = traces.pruned_model()
    with pytest.raises(PruneError, match="empty"):
        Trace.from_text(pruned, tok, "")
    one = Trace.from_text(pruned, tok, "a")
    assert one.drop_step.tolist() == [[NEVER]] * 3
    assert one.sparsity.tolist() == [[0.0]] * 3
    assert Trace.from_text(pruned, tok, SPLIT).text == SPLIT
    with pytest.raises(PruneError, match="512 positions"):
        Trace.from_text(pruned, tok, "a b " * 300)
