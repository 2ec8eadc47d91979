"""Detokeniser and stop strings: streamed text is the text, and nothing is taken back."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvprune.serve.detokeniser import Detokeniser, Stops
from kvprune.tiny import FOLDER


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.mark.parametrize(
    "text", ["Once upon a time, Lily said: 'No!'", "naïve café — 日本語 🎉🎉 done", "a\n\n  b\t c"]
)
def test_pieces_add_up(tokenizer, text):
    ids = tokenizer(text).input_ids
    for start in range(1, len(ids)):
        detokeniser = Detokeniser(tokenizer, ids[:start])
        pieces = [detokeniser.add(token) for token in ids[start:]] + [detokeniser.end()]
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        before = tokenizer.decode(ids[:start], clean_up_tokenization_spaces=False)
        if not before.endswith("�"):
            assert "".join(pieces) == whole[len(before) :]


def test_a_long_answer(tokenizer):
    ids = tokenizer("It was 🎉 a day. " * 60).input_ids
    detokeniser = Detokeniser(tokenizer, ids[:1])
    text = "".join(map(detokeniser.add, ids[1:])) + detokeniser.end()
    decode = tokenizer.decode
    assert decode(ids[:1]) + text == decode(ids, clean_up_tokenization_spaces=False)
    assert len(detokeniser._tokens) < 100


pieces = st.lists(st.text("abc", max_size=4), max_size=12)
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(pieces, stops, st.booleans())
def test_the_stop_that_is_complete_first(pieces, wanted, include):
    watch, given, found = Stops(wanted, include), "", None
    for piece in pieces:
        text, found = watch.add(piece)
        given += text
        if found:
            break
    else:
        given += watch.end()
    whole = "".join(pieces)
    ends = [
        (end, end - len(stop), stop)
        for end in range(len(whole) + 1) for stop in wanted if whole[:end].endswith(stop)
    ]  # fmt: skip
    if not ends:
        assert (given, found) == (whole, None)
        return
    # found when its piece arrives: an earlier one is never passed over
    end, start, stop = min(ends)
    assert found is not None
    arrived = next(n for n in itertools.accumulate(map(len, pieces)) if n >= end)
    complete = [e for e in ends if e[0] <= arrived]
    assert (end, start, stop) in complete
    assert given == whole[: end if include else start]


def test_before_the_minimum_nothing_stops():
    watch = Stops(["b"])
    assert watch.add("ab", may_stop=False) == ("ab", None)
    assert watch.add("ab") == ("a", "b")
