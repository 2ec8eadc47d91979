"""Prefixes against a list that is searched from the longest on."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvprune.serve import prefixes
from kvprune.serve.prefixes import Prefixes


@dataclass(frozen=True)
class Fake:
    nbytes: int


texts = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), texts, st.sampled_from("ab")), max_size=25))
def test_the_longest_that_fits(operations):
    kept, model = Prefixes(30), []
    for adds, tokens, kind in operations:
        if adds:
            kept.add(tokens, kind, Fake(10))
            entry = (tokens, kind)
            model = [*(e for e in model if e != entry), entry][-3:]
        else:
            found = kept.find(tokens, kind)
            fits = [e for e in model if e[1] == kind and len(e[0]) < len(tokens)
                    and tokens[: len(e[0])] == e[0]]  # fmt: skip
            want = max(fits, key=lambda e: len(e[0]), default=None)
            assert (found and (found.tokens, found.kind)) == want
            if want:
                model = [*(e for e in model if e != want), want]
        assert {(p.tokens, p.kind) for p in kept.all()} == set(model)
        assert kept.bytes == 10 * len(model) <= 30


def test_pinned_ones_stay():
    kept = Prefixes(30)
    first = kept.add((1,), "", Fake(20), pinned=True)
    assert kept.add((2,), "", Fake(20)) is None
    for n in range(5):
        kept.add((3, n), "", Fake(10))
    assert [p.tokens for p in kept.all()] == [(1,), (3, 4)]
    assert kept.remove(first.id)
    assert not kept.remove(first.id)
    assert kept.bytes == 10


def test_a_hash_that_collides_is_no_hit(monkeypatch):
    monkeypatch.setattr(prefixes, "_hashes", lambda tokens, lengths: dict.fromkeys(lengths, 0))
    kept = Prefixes(100)
    kept.add((1, 2), "", Fake(10))
    assert kept.find((3, 4, 5), "") is None
    assert kept.find((1, 2, 5), "").tokens == (1, 2)


def test_short_ones_are_not_wanted():
    kept = Prefixes(100)
    assert not kept.wants((1,) * 31, "")
    assert kept.wants((1,) * 32, "")
    kept.add((1,) * 32, "", Fake(10))
    assert not kept.wants((1,) * 32, "")
