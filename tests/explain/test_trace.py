"""The record of a text: against the cache, the masked forward pass and plain loops."""

import json

import numpy as np
import pandas
import pytest
import torch

import kvprune
import traces as made
from kvprune import NEVER, PruneError
from kvprune.explain import Trace
from kvprune.explain.pieces import KINDS, kind, pieces

SPLIT = "naïve 😀 — שלום, 世界! 👩‍👩‍👧"


@pytest.fixture(scope="module")
def tok():
    return made.tokenizer()


@pytest.fixture(autouse=True)
def _end_token(tok):
    before = tok.eos_token_id
    yield
    tok.eos_token_id = before


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("options", [{}, {"depth_tied": True}, {"protect_recent": 3}])
def test_a_text_is_traced_as_the_masked_forward_pass_drops(tok, family, options):
    pruned = made.pruned_model(family, **options)
    trace = Trace.from_text(pruned, tok, made.TEXT)
    assert trace.text == made.TEXT
    want = pruned.trace(tok(made.TEXT).input_ids)[:, 0].numpy()
    assert (want < NEVER).any()
    assert np.array_equal(trace.drop_step, want)


@pytest.mark.parametrize("config", [kvprune.LocalConfig(4), kvprune.TovaConfig(9)])
def test_baselines_leave_a_trace_too(tok, config):
    pruned = kvprune.attach(made.zoo.make("gpt2", vocab_size=made.VOCAB), config)
    trace = Trace.from_text(pruned, tok, made.TEXT)
    want = pruned.trace(list(trace.ids))[:, 0].numpy()
    assert np.array_equal(trace.drop_step, np.where(want < len(trace.ids), want, NEVER))


def test_generation_is_traced_token_by_token(tok):
    """What a step of generation holds in its cache is what the trace says, for every row."""
    pruned, held = made.pruned_model("llama"), []

    def watch(ids, scores):
        slots = [store.table.get() for store in cache.stores]
        rows = range(len(ids))
        held.append([[set(s.token[b][s.valid[b]].tolist()) for s in slots] for b in rows])
        return scores

    texts = [made.TEXT, "Once upon a time", "A"]
    tok.pad_token = tok.eos_token
    inputs = tok(texts, return_tensors="pt", padding=True, padding_side="left")
    cache = kvprune.PrunedCache(pruned, record=True)
    out = pruned.model.generate(
        **inputs, max_new_tokens=30, do_sample=False, past_key_values=cache, pad_token_id=0,
        return_dict_in_generate=True, logits_processor=[watch],
    )  # fmt: skip
    traces = Trace.from_generate(out, tok, inputs.input_ids, inputs.attention_mask)
    for row, trace in enumerate(traces):
        assert trace.prompt == int(inputs.attention_mask[row].sum())
        assert trace.text == texts[row] + tok.decode(
            out.sequences[row, inputs.input_ids.shape[1] :]
        )
        for number, rows in enumerate(held):
            read = trace.prompt + number
            for layer, tokens in enumerate(rows[row]):
                step = trace.drop_step[layer, :read]
                assert tokens == {j for j, i in enumerate(step.tolist()) if i >= read}
    assert (traces[0].drop_step < NEVER).any()


def test_a_row_ends_at_its_end_token(tok):
    pruned = made.pruned_model()
    free, inputs = made.generated(pruned, tok, [made.TEXT, "Why"])
    length = inputs.input_ids.shape[1]
    # an end token that the second row writes early
    end = int(free.sequences[1, length + 4])
    first = free.sequences[1, length:].tolist().index(end) + 1
    tok.eos_token_id = end
    out, inputs = made.generated(pruned, tok, [made.TEXT, "Why"], eos_token_id=end)
    trace = Trace.from_generate(out, tok, inputs.input_ids, inputs.attention_mask)[1]
    assert len(trace.ids) == trace.prompt + first
    want = pruned.trace(list(trace.ids))[:, 0]
    # the end token itself was read only if the batch went on
    assert np.array_equal(trace.drop_step, want.numpy())


def test_beams_are_refused(tok):
    pruned = made.pruned_model()
    out, inputs = made.generated(pruned, tok, ["Why"], new=3, num_beams=2)
    with pytest.raises(PruneError, match="from_ids"):
        Trace.from_generate(out, tok, inputs.input_ids)


def test_kept_sparsity_and_mask_against_loops():
    trace = made.random_trace(3, 40)
    for l, step in enumerate(trace.drop_step.tolist()):
        mask = trace.visible(l)
        for k in range(40):
            sees = [j for j in range(40) if j <= k < step[j]]
            assert np.nonzero(mask[k])[0].tolist() == sees
            assert trace.kept[l, k] == len(sees)
            gone = k + 1 - len(sees)
            assert trace.sparsity[l, k] == pytest.approx(gone / k if k else 0)
            assert trace.dropped_by(k, l) == [j for j in range(40) if step[j] == k]


def test_bytes_are_those_of_the_cache(tok):
    pruned = made.pruned_model("llama")
    cache = kvprune.PrunedCache(pruned)
    ids = torch.tensor([tok(made.TEXT).input_ids])
    pruned.model(ids, past_key_values=cache)
    trace = Trace.from_text(pruned, tok, made.TEXT)
    T = ids.shape[1]
    assert len(trace.layers) * T * trace.dense_bytes == cache.dense_nbytes
    slots = sum(store.table.capacity for store in cache.stores)
    assert slots * trace.kept_bytes == cache.nbytes


@pytest.mark.parametrize("name", ["t.json", "t.npz"])
def test_saved_and_loaded(tmp_path, name):
    tokens = ("</script>", "\u2028", "", "😀", "\n")
    trace = made.random_trace(2, 5, tokens=tokens)
    again = Trace.load(trace.save(tmp_path / "new" / name))
    assert np.array_equal(again.drop_step, trace.drop_step)
    assert again.drop_step.dtype == np.int32
    assert again.to_dict() == trace.to_dict()
    assert again.tokens == tokens
    assert list((tmp_path / "new").iterdir()) == [tmp_path / "new" / name]


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(PruneError, match="does not exist"):
        Trace.load(tmp_path / "none.json")
    with pytest.raises(PruneError, match=r"\.json nor in \.npz"):
        made.random_trace(1, 2).save(tmp_path / "t.txt")
    for name, text, message in [
        ("a.json", "{", "a.json"), ("b.npz", "x", "b.npz"), ("c.json", "[1]", "c.json"),
        ("d.json", "{}", "format 1"),
    ]:  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(PruneError, match=message):
            Trace.load(tmp_path / name)
    values = made.random_trace(2, 5).to_dict()
    for change, message in [
        ({"drop_step": [[1, 2, 3, 4, -1]]}, "shape"),
        ({"drop_step": [[0, 2, 3, 4, -1], [-1] * 5]}, "only a later token"),
        ({"tokens": [], "ids": [], "drop_step": [[], []]}, "no tokens"),
        ({"more": 1}, "damaged"),
    ]:
        (tmp_path / "e.json").write_text(json.dumps(values | change))
        with pytest.raises(PruneError, match=message):
            Trace.load(tmp_path / "e.json")


def test_table():
    trace = made.random_trace(2, 12)
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


def test_characters_of_several_tokens(tok):
    ids = tok(SPLIT).input_ids
    made_pieces = pieces(tok, ids)
    assert "".join(made_pieces) == SPLIT
    assert "" in made_pieces
    assert "😀" in made_pieces
    assert not any("�" in piece for piece in made_pieces)
    # a text that ends within a character says so
    cut = ids[: made_pieces.index("😀")]
    assert "".join(pieces(tok, cut)).endswith("�")


def test_kinds():
    want = {
        ",": "punctuation", ' "': "punctuation", "...": "punctuation", "\n": "line break",
        " the": "word", "ing": "part of a word", " 12": "number", "<|endoftext|>": "other",
        "": "other", " ": "other", "€": "punctuation", "</s>": "other", "<": "punctuation",
        "שלום": "part of a word",
    }  # fmt: skip
    assert {piece: kind(piece) for piece in want} == want
    assert set(want.values()) == set(KINDS)


def test_odd_texts(tok):
    pruned = made.pruned_model()
    with pytest.raises(PruneError, match="empty"):
        Trace.from_text(pruned, tok, "")
    one = Trace.from_text(pruned, tok, "a")
    assert one.drop_step.tolist() == [[NEVER]] * 3
    assert one.sparsity.tolist() == [[0.0]] * 3
    assert Trace.from_text(pruned, tok, SPLIT).text == SPLIT
    with pytest.raises(PruneError, match="512 positions"):
        Trace.from_text(pruned, tok, "a b " * 300)
