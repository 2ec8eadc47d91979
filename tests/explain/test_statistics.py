"""Statistics over traces, against plain loops."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch

import traces
from kvprune import NEVER, PruneError
from kvprune.explain import Trace, parts_of_speech
from kvprune.explain.context_switch import TEXTS, across_context_switch, trace_texts
from kvprune.explain.nearest_keys import keys_of, nearest_distance, nearest_keys
from kvprune.explain.statistics import statistics
from kvprune.explain.token_text import token_kind

L = 3
TRACES = [traces.random_trace(L, 40, seed=1), traces.random_trace(L, 23, seed=2)]


def pairs(l):
    """Every token and later token of every text: (trace, k, j, whether k sees j)."""
    for trace in TRACES:
        T = len(trace.tokens)
        for j in range(T):
            for k in range(j + 1, T):
                yield trace, k, j, k < trace.drop_step[l, j]


def drops(l):
    for trace in TRACES:
        for j, step in enumerate(trace.drop_step[l].tolist()):
            if step < NEVER:
                yield trace, j, step


def share(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def counted():
    return statistics(TRACES)


def test_sparsity_and_distance(counted):
    assert counted.texts == 2
    assert counted.tokens == 63
    for l in range(L):
        assert counted.sparsity_by_layer[l] == pytest.approx(share(not s for *_, s in pairs(l)))
        assert counted.drops_by_layer[l] == len(list(drops(l)))
        for d in range(1, 40):
            want = share(seen for _, k, j, seen in pairs(l) if k - j == d)
            assert counted.kept_by_distance[l][d - 1] == pytest.approx(want)


def test_kept_by_kind_and_speech(counted):
    for name, kept in counted.kept_by_kind.items():
        by_layer = [share(s for t, _, j, s in pairs(l) if token_kind(t.tokens[j]) == name)
                    for l in range(L)]  # fmt: skip
        assert kept.by_layer == pytest.approx(by_layer)
        assert kept.share == pytest.approx(share(by_layer))
        assert kept.tokens == sum(token_kind(token) == name for t in TRACES for token in t.tokens)
    tags = {id(t): parts_of_speech.tag_tokens(t.tokens) for t in TRACES}
    assert counted.kept_by_speech
    for name, kept in counted.kept_by_speech.items():
        by_layer = [share(s for t, _, j, s in pairs(l) if tags[id(t)][j] == name) for l in range(L)]
        assert kept.by_layer == pytest.approx(by_layer)


def test_droppers(counted):
    total = sum(len(list(drops(l))) for l in range(L))
    for name, row in counted.droppers_by_kind.items():
        counts = [sum(token_kind(t.tokens[s]) == name for t, _, s in drops(l)) for l in range(L)]
        assert row.share == pytest.approx(sum(counts) / total)
        for l in range(L):
            assert row.by_layer[l] == pytest.approx(counts[l] / len(list(drops(l))))
        want = sum(token_kind(token) == name for t in TRACES for token in t.tokens) / 63
        assert row.of_tokens == pytest.approx(want)
    first = next(iter(counted.top_droppers))
    by_text = [sum(t.tokens[s].strip() == first for t, _, s in drops(l)) for l in range(L)]
    assert counted.top_droppers[first].share == pytest.approx(sum(by_text) / total)
    shares = [row.share for row in counted.top_droppers.values()]
    assert shares == sorted(shares, reverse=True)


def test_positions_and_lifetimes(counted):
    for l in range(L):
        for b, first in enumerate(counted.positions):
            last = counted.positions[b + 1] if b + 1 < len(counted.positions) else 40
            dropped = [t.drop_step[l, j] < NEVER for t in TRACES for j in range(first, last)
                     if j < len(t.tokens)]  # fmt: skip
            assert counted.dropped_by_position[l][b] == pytest.approx(share(dropped))
        for b, got in enumerate(counted.lifetimes[l]):
            lived = sum(2**b <= step - j < 2 ** (b + 1) for _, j, step in drops(l))
            assert got == pytest.approx(lived / 63)


def test_text_of_one_token():
    one = statistics([traces.random_trace(2, 1)])
    assert one.sparsity_by_layer == [0, 0]
    assert one.kept_by_kind == {}
    with pytest.raises(PruneError, match="no trace"):
        statistics([])
    with pytest.raises(PruneError, match="different layers"):
        statistics([traces.random_trace(2, 5), traces.random_trace(3, 5)])


def test_part_of_speech_is_that_of_the_word():
    tokens = ("The", " un", "believ", "able", " cat", " did", "n", "'t", " sleep", ".", " ", "",
              "😀", "\n", "Oz", "’", "s", " 12", " of", ' "')  # fmt: skip
    tags = dict(zip(tokens, parts_of_speech.tag_tokens(tokens), strict=True))
    assert tags["The"] == "determiner"
    assert tags[" un"] == tags["believ"] == tags["able"] == "adjective"
    assert tags[" cat"] == "noun"
    assert tags["n"] == tags["'t"] == "adverb"
    assert tags["."] == tags[' "'] == "punctuation"
    assert tags[" "] == tags[""] == tags["\n"] == tags["😀"] == "other"
    assert tags[" 12"] == "number"
    assert tags[" of"] == "preposition"


def test_spacy_is_used_if_installed(monkeypatch):
    """With a stand-in for the calls of spaCy 3.8: a Doc of our words, pos_ of each token."""

    class Token:
        def __init__(self, word):
            self.pos_ = {"Dorothy": "PROPN", "saw": "VERB", "n't": "PART"}.get(word, "X")

    class Pipeline:
        vocab = "its vocabulary"

        def __call__(self, doc):
            assert doc[0] == self.vocab
            return [Token(word) for word in doc[1]]

    spacy, tokens = ModuleType("spacy"), ModuleType("spacy.tokens")
    spacy.load = {"en_core_web_sm": Pipeline()}.__getitem__
    tokens.Doc = lambda vocab, words: (vocab, words)
    for name, module in (("spacy", spacy), ("spacy.tokens", tokens)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(parts_of_speech, "_has_spacy", lambda: True)
    parts_of_speech._tagger.cache_clear()
    try:
        assert parts_of_speech.available()
        tags = parts_of_speech.tag_tokens(("Dor", "othy", " saw", " it", ".", " did", "n’t"))
    finally:
        parts_of_speech._tagger.cache_clear()
    assert tags == ["name", "name", "verb", "other", "punctuation", "other", "adverb"]


def test_nearest_distance_against_loops():
    keys = torch.randn(9, 5, generator=torch.Generator().manual_seed(0))
    kept = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0, 1]).bool()
    got = nearest_distance(keys, kept)
    for j in range(9):
        cosines = [torch.cosine_similarity(keys[j], keys[i], dim=0) for i in range(9)
                   if i != j and kept[i]]  # fmt: skip
        assert got[j] == pytest.approx(1 - float(max(cosines)), abs=1e-6)
    alone = nearest_distance(keys[:2], torch.tensor([True, False]))
    assert alone[0] == torch.inf
    assert alone[1] < torch.inf


def test_keys_equal_those_in_the_cache():
    pruned = traces.pruned_model("llama")
    ids = list(range(5, 45))
    keys, step = keys_of(pruned, ids)
    assert torch.equal(step, pruned.trace(ids)[:, 0])
    with torch.no_grad():
        cache = pruned.model(torch.tensor([ids]), use_cache=True).past_key_values
    for layer, store in enumerate(cache.stores):
        slots = store.table.get()
        for s in range(slots.token.shape[1]):
            if slots.valid[0, s]:
                key = keys[layer][slots.token[0, s]]
                torch.testing.assert_close(key, slots.keys[0, :, s].flatten())


@pytest.mark.parametrize("among_kept", [False, True])
def test_nearest_keys_of_dropped_and_kept_tokens(among_kept):
    pruned = traces.pruned_model("llama")
    rows = [list(range(5, 45)), list(range(50, 80))]
    got = nearest_keys(pruned, rows, among_kept)
    assert sum(got.dropped) == pytest.approx(1)
    assert sum(got.kept) == pytest.approx(1)
    for layer in range(3):
        dropped_distances, kept_distances = [], []
        for ids in rows:
            keys, step = keys_of(pruned, ids)
            kept = step[layer] == NEVER
            assert not kept.all()
            candidates = kept if among_kept else torch.ones_like(kept)
            distance = nearest_distance(keys[layer], candidates)
            dropped_distances += distance[~kept].tolist()
            kept_distances += distance[kept].tolist()
        assert got.mean_dropped[layer] == pytest.approx(share(dropped_distances))
        assert got.mean_kept[layer] == pytest.approx(share(kept_distances))


def test_context_switch_against_loops():
    trace = traces.random_trace(2, 30)
    starts = [0, 11, 20]
    by_distance = np.random.default_rng(0).random((2, 29)).tolist()
    got = across_context_switch(trace, starts, by_distance)
    text_of = [0] * 11 + [1] * 9 + [2] * 10
    for l in range(2):
        sees = {True: [], False: []}
        expected = []
        for k in range(30):
            for j in range(k):
                sees[text_of[k] == text_of[j]].append(k < trace.drop_step[l, j])
                if text_of[k] != text_of[j]:
                    expected.append(by_distance[l][k - j - 1])
        assert got.within[l] == pytest.approx(share(sees[True]))
        assert got.across[l] == pytest.approx(share(sees[False]))
        assert got.expected[l] == pytest.approx(share(expected))
    with pytest.raises(PruneError, match="longer rows"):
        across_context_switch(trace, starts, [[0.5] * 5] * 2)


def test_texts_of_the_switch_are_joined():
    pruned, tok = traces.pruned_model(), traces.tokenizer()
    trace, starts = trace_texts(pruned, tok, ["One two.", "Three four.", "Five."])
    assert trace.text == "One two.\n\nThree four.\n\nFive."
    assert "".join(trace.tokens[: starts[1]]) == "One two."
    with pytest.raises(PruneError, match="two or more"):
        trace_texts(pruned, tok, ["One."])
    assert isinstance(trace, Trace)
    assert len(TEXTS) == 3
