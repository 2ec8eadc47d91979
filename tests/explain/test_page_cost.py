"""What pruning cost, in a real browser: the strip, the worst tokens, tokens brought back."""

import dataclasses
import re

import numpy as np
import pytest

import page_traces
from browser import choose_layer, screenshot, settle, token, tokens_with


@pytest.fixture(scope="module")
def trace():
    return page_traces.costly_trace()


def strip(tab):
    """Height of the bar under each token, and whether it is in the colour of a gain."""
    settle(tab)
    return tab.evaluate("""() => [...document.querySelectorAll("#text .t")].map((t) =>
        [parseFloat(getComputedStyle(t).borderBottomWidth), t.classList.contains("better")])""")


def test_strip_shows_the_losses(visit, trace):
    tab = visit(trace)
    added = np.nan_to_num(trace.loss - trace.dense_loss)

    def expected(values, full):
        heights = np.minimum(9, 9 * np.abs(values) / full)
        return np.where(heights < 1, 0, heights)

    shown = strip(tab)
    # browsers round a border to whole pixels, downwards
    assert [h for h, _ in shown] == pytest.approx(expected(added, 3), abs=1)
    assert [h for h, _ in shown][40] == 9
    assert [better for _, better in shown] == (added < 0).tolist()
    for name, values in (("loss", trace.loss), ("dense", trace.dense_loss)):
        tab.select_option("#strip", name)
        heights = [h for h, _ in strip(tab)]
        assert heights == pytest.approx(expected(np.nan_to_num(values), 12), abs=1)
        assert max(heights) >= 2
    tab.select_option("#strip", "none")
    assert {h for h, _ in strip(tab)} == {0}
    # the strip does not move the words
    tab.select_option("#strip", "added")
    boxes = tab.evaluate("""() => [...document.querySelectorAll("#text .t")].map(t => {
        const r = t.getBoundingClientRect(); return [r.x, r.width] })""")
    tab.select_option("#strip", "none")
    settle(tab)
    assert boxes == tab.evaluate("""() => [...document.querySelectorAll("#text .t")].map(t => {
        const r = t.getBoundingClientRect(); return [r.x, r.width] })""")


def test_one_token_has_one_loss(visit, trace):
    """The strip is rounded more than the list of the worst tokens."""
    loss = trace.loss.copy()
    loss[40] = 5.0174
    worst = trace.misses[0]._replace(loss=5.0174)
    tab = visit(dataclasses.replace(trace, loss=loss, misses=(worst, *trace.misses[1:])))
    assert tab.inner_text(".miss .value").endswith("→ 5.02")
    token(tab, 40).click()
    settle(tab)
    assert "loss 5.02, dense 2.00 (+3.02)" in tab.inner_text(".loss")


def test_mean_losses_and_the_loss_of_a_token(visit, trace):
    tab = visit(trace)
    summary = tab.inner_text("#cost-summary")
    pruned, dense = np.nanmean(trace.loss), np.nanmean(trace.dense_loss)
    found = re.match(r"mean loss ([\d.]+) pruned, ([\d.]+) dense: \+([\d.]+) per token", summary)
    assert float(found[1]) == pytest.approx(pruned, abs=0.004)
    assert float(found[2]) == pytest.approx(dense, abs=0.004)
    assert "the base model without pruning" in summary
    token(tab, 7).click()
    settle(tab)
    found = re.match(r"Its own prediction: loss ([\d.]+), dense ([\d.]+)", tab.inner_text(".loss"))
    assert float(found[1]) == pytest.approx(trace.loss[7], abs=0.01)
    assert float(found[2]) == pytest.approx(trace.dense_loss[7], abs=0.01)
    token(tab, 0).click()
    settle(tab)
    assert tab.locator(".loss").count() == 0


def test_worst_tokens_and_what_they_lacked(visit, trace):
    tab = visit(trace)
    rows = tab.locator(".miss")
    assert rows.count() == 12
    assert [("not tried" in row.inner_text()) for row in rows.all()] == [False] * 3 + [True] * 9
    losses = f"{trace.misses[0].dense_loss:.2f} → {trace.misses[0].loss:.2f}"
    assert losses in rows.nth(0).inner_text()
    assert not tab.is_visible("#returns")
    rows.nth(0).click()
    settle(tab)
    assert tokens_with(tab, "selected") == [40]
    assert tokens_with(tab, "missed") == [40]
    assert tokens_with(tab, "lacked") == [20, 28]
    assert "(token 40) lacked" in tab.inner_text("#returns h3")
    bars = tab.evaluate("""() => [...document.querySelectorAll("#returns .row")].map((row) => [
        row.querySelector(".value").textContent, row.querySelector(".fill").style.width])""")
    miss = trace.misses[0]
    losses = [miss.dense_loss, miss.loss, *(back.loss for back in miss.returns), miss.open_loss]
    assert [float(value) for value, _ in bars] == pytest.approx(losses, abs=0.006)
    widths = [float(width.rstrip("%")) for _, width in bars]
    assert widths == pytest.approx([100 * loss / miss.loss for loss in losses], abs=0.5)
    screenshot(tab, "returns")


def test_part_of_a_word_is_named_with_it(visit, trace):
    tokens = list(trace.tokens)
    tokens[19:23] = [" Ts", "en", "g", ","]
    tokens[28:30] = [" mat", " on"]
    tab = visit(dataclasses.replace(trace, tokens=tuple(tokens)))
    tab.locator(".miss").nth(0).click()
    settle(tab)
    names = tab.locator("#returns .return .name").all_inner_texts()
    assert names[0] == "“en” of “Tseng” (20) back in every layer"
    assert names[1] == "“mat” (28) back in layer 1"


def test_bringing_a_token_back(visit, trace):
    tab = visit(trace)
    tab.locator(".miss").nth(0).click()
    settle(tab)
    back = tab.locator("#returns .return")
    assert "back in every layer" in back.nth(0).inner_text()
    back.nth(0).click()
    settle(tab)
    assert tokens_with(tab, "returned") == [20]
    assert back.nth(0).get_attribute("aria-pressed") == "true"
    told = tab.inner_text("#back-note")
    assert "(token 20) back in every layer" in told
    assert f"from {trace.misses[0].loss:.2f} to {trace.misses[0].returns[0].loss:.2f}" in told
    assert f"dense it is {trace.misses[0].dense_loss:.2f}" in told
    # a return in one layer shows that layer
    back.nth(1).click()
    settle(tab)
    assert tokens_with(tab, "returned") == [28]
    assert "layer 1" in tab.inner_text("#back-note")
    assert tab.get_attribute('#layers [aria-checked="true"]', "aria-label") == "layer 1"
    screenshot(tab, "brought-back")
    # once more: it leaves again
    back.nth(1).click()
    assert tokens_with(tab, "returned") == []
    tab.keyboard.press("Escape")
    assert tokens_with(tab, "missed") == []
    assert not tab.is_visible("#returns")


def test_a_worst_token_is_reached_from_the_text(visit, trace):
    tab = visit(trace)
    choose_layer(tab, 0)
    token(tab, 50).click()
    settle(tab)
    tab.locator(".to-miss").click()
    assert tokens_with(tab, "missed") == [50]
    # another token is another question
    token(tab, 5).click()
    assert tokens_with(tab, "missed") == []


def test_further_tokens_are_listed_without_returns(visit):
    trace = page_traces.costly_trace(misses=False)
    tab = visit(trace)
    rows = tab.locator(".miss")
    order = np.argsort(-np.nan_to_num(trace.loss - trace.dense_loss))
    assert rows.count() == 12
    assert [f"token {i}" in row.inner_text() for i, row in zip(order[:12], rows.all(), strict=True)]
    assert "not tried" in rows.nth(0).inner_text()
    rows.nth(0).click()
    settle(tab)
    assert "--misses" in tab.inner_text("#back-note")
    assert tokens_with(tab, "lacked") == []
