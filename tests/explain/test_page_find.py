"""Search, and links that open the page at a token, layer and time."""

import numpy as np
import pytest

import page_traces
import traces
from browser import choose_layer, screenshot, set_time, settle, tokens_with, wait_until
from kvprune import NEVER
from kvprune.explain.token_text import token_kind

WORDS = (" The", " cat", " sat", ".", "\n", " Nobody", " con", "cat", "en", "ated", " 12", " cats")


@pytest.fixture(scope="module")
def trace():
    return traces.random_trace(2, len(WORDS), tokens=WORDS)


def search(tab, words):
    tab.fill("#search", words)
    settle(tab)
    return tab.evaluate("[...document.querySelectorAll('#text .found')].map(t => +t.dataset.i)")


def test_search_finds_text_within_and_across_tokens(visit, trace):
    tab = visit(trace)
    assert search(tab, "cat") == [1, 7, 11]
    assert tab.inner_text("#search-note") == "3 tokens"
    assert search(tab, "CAT SAT") == [1, 2]
    assert search(tab, "concatenated") == [6, 7, 8, 9]
    assert search(tab, "dog") == []
    assert tab.inner_text("#search-note") == "not found"
    assert tab.is_disabled("#search-next")
    assert search(tab, "") == []
    assert tab.inner_text("#search-note") == ""


def test_search_steps_through_the_matches(visit, trace):
    tab = visit(trace)
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "search"
    tab.keyboard.type("cat")
    seen = []
    for key in ("Enter", "Enter", "Enter", "Enter", "Shift+Enter"):
        tab.keyboard.press(key)
        seen += tokens_with(tab, "selected")
    assert seen == [1, 7, 11, 1, 11]
    assert tab.inner_text("#search-note") == "3 of 3"
    screenshot(tab, "search")
    # the keys of the page are letters of the search here
    assert tab.input_value("#search") == "cat"
    tab.keyboard.type("m")
    assert not tab.evaluate("document.getElementById('large').open")
    tab.keyboard.press("Escape")
    assert tokens_with(tab, "found") == []
    # n and N outside of the field
    search(tab, "cat")
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("Escape")
    tab.keyboard.press("n")
    assert tokens_with(tab, "selected") == [1]
    tab.keyboard.press("N")
    assert tokens_with(tab, "selected") == [11]


def test_search_by_kind_and_fate(visit, trace):
    tab = visit(trace)
    tab.select_option("#search-kind", label="number")
    assert tokens_with(tab, "found") == [10]
    tab.select_option("#search-kind", label="punctuation")
    assert tokens_with(tab, "found") == [3]
    # both at once
    tab.select_option("#search-kind", label="word")
    assert search(tab, "cat") == [i for i in (1, 7, 11) if token_kind(WORDS[i]) == "word"]
    search(tab, "")
    tab.select_option("#search-kind", label="dropped in every layer")
    gone = (trace.drop_step < NEVER).all(0)
    assert tokens_with(tab, "found") == np.nonzero(gone)[0].tolist()
    kinds = tab.locator("#search-kind option").all_inner_texts()
    assert "generated" in kinds
    # the tokens that are not there are not offered
    assert "other" not in kinds[: kinds.index("dropped in every layer")] or len(kinds) > 10


@pytest.fixture(scope="module")
def long():
    return page_traces.voting_trace(L=4, T=400)


def wait_for_link(tab, words):
    wait_until(tab, f"location.hash === '{words}'")


def test_link_opens_token_layer_and_time(visit, long):
    tab = visit(long, hash="#token=333&layer=2&time=350")
    assert tokens_with(tab, "selected") == [333]
    assert tokens_with(tab, "now") == [350]
    assert tab.get_attribute('#layers [aria-checked="true"]', "aria-label") == "layer 2"
    assert "token 333," in tab.inner_text("#detail")
    # and the token is in sight
    box = tab.locator("#text .t").nth(333).bounding_box()
    frame = tab.locator("#text").bounding_box()
    assert frame["y"] <= box["y"] < frame["y"] + frame["height"]


def test_threads_of_a_link_start_at_its_token(visit):
    """The bars under the text make lines higher, at the start and whenever they are chosen."""
    tab = visit(page_traces.costly_trace(T=200), hash="#token=25&layer=0&time=199")
    for strip in (None, "none", "loss"):
        if strip:
            tab.select_option("#strip", strip)
            settle(tab)
        box = tab.locator("#text .t").nth(25).bounding_box()
        frame = tab.locator(".text-frame").bounding_box()
        path = tab.locator(".threads path").first.get_attribute("d")
        x, y = map(float, path[1:].split(" ")[0].split(","))
        assert box["x"] <= frame["x"] + x <= box["x"] + box["width"]
        assert box["y"] <= frame["y"] + y <= box["y"] + box["height"]


def test_link_follows_the_view(visit, long):
    tab = visit(long)
    assert tab.evaluate("location.hash") == ""  # opening the page is no move
    choose_layer(tab, 3)
    wait_for_link(tab, "#layer=3&time=399")
    set_time(tab, 120)
    wait_for_link(tab, "#layer=3&time=120")
    tab.locator("#text .t").nth(11).click()
    wait_for_link(tab, "#token=11&layer=3&time=120")
    tab.keyboard.press("0")
    wait_for_link(tab, "#token=11&layer=all&time=120")
    tab.keyboard.press("Escape")
    wait_for_link(tab, "#layer=all&time=120")
    # a link pasted into the address bar
    tab.evaluate("location.hash = '#token=5&layer=1&time=60'")
    wait_until(tab, "document.querySelector('#time').value === '60'")
    assert tokens_with(tab, "selected") == [5]
    assert tab.get_attribute('#layers [aria-checked="true"]', "aria-label") == "layer 1"


@pytest.mark.parametrize(
    "hash",
    ["#token=400&layer=9&time=-1", "#token=x&layer=&time=1e3", "#%E0%A4%A", "#token", "#a=b&&&=",
     "#token=1.5&time=99999999999&side=7", "#<script>"],
)  # fmt: skip
def test_bad_links_are_ignored(visit, long, hash):
    tab = visit(long, hash=hash)
    assert tokens_with(tab, "selected") == []
    assert tokens_with(tab, "now") == [399]
    assert tab.get_attribute('#layers [aria-checked="true"]', "aria-label") == "all layers"


def test_good_parts_of_a_bad_link_count(visit, long):
    tab = visit(long, hash="#token=7&layer=77&time=50")
    assert tokens_with(tab, "selected") == [7]
    assert tokens_with(tab, "now") == [50]


def test_link_can_be_copied(visit, long):
    tab = visit(long, permissions=["clipboard-read", "clipboard-write"])
    tab.locator("#text .t").nth(3).click()
    tab.click("#copy-link")
    wait_until(tab, "document.getElementById('copied').textContent === 'Link copied'")
    # nothing lies over the words
    assert tab.evaluate("""() => {
        const box = document.getElementById("copied").getBoundingClientRect();
        return [box.top + 2, box.bottom - 2].every((y) =>
            document.elementFromPoint(box.right - 4, y).id === "copied") }""")
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied == tab.url.split("#")[0] + "#token=3&layer=all&time=399"


def test_link_that_cannot_be_copied_is_in_the_address(visit, long):
    refuse = "navigator.clipboard.writeText = () => Promise.reject(new Error('no'))"
    tab = visit(long, before=refuse)
    set_time(tab, 44)
    tab.click("#copy-link")
    wait_until(tab, "document.getElementById('copied').textContent.includes('address bar')")
    assert tab.evaluate("location.hash") == "#layer=all&time=44"


def test_link_names_the_side_of_a_comparison(visit, long):
    other = page_traces.voting_trace(L=4, T=400, threshold=0.5)
    tab = visit(long, against=other, hash="#layer=1&time=99&side=1")
    assert tab.get_attribute("#sides button:nth-child(2)", "aria-checked") == "true"
    tab.keyboard.press(".")
    wait_for_link(tab, "#layer=1&time=100&side=1")
