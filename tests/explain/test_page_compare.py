"""Two traces of one text side by side, in a real browser."""

import numpy as np
import pytest

import page_traces
from browser import choose_layer, screenshot, set_time, settle, token, tokens_with

T = 60
PANES = ("#text", "#other-text")


@pytest.fixture(scope="module")
def pair():
    one = page_traces.costly_trace(threshold=0.0)
    return one, page_traces.costly_trace(threshold=1.0)


def test_both_texts_follow_time_layer_and_selection(visit, pair):
    one, other = pair
    tab = visit(one, against=other)
    for layer, t in ((1, 59), (2, 30)):
        choose_layer(tab, layer)
        set_time(tab, t)
        j = np.arange(T)
        for trace, pane in zip(pair, PANES, strict=True):
            step = trace.drop_step[layer]
            assert tokens_with(tab, "held", pane) == j[(j <= t) & (step > t)].tolist()
            assert tokens_with(tab, "gone", pane) == j[(j <= t) & (step <= t)].tolist()
            assert tokens_with(tab, "now", pane) == [t]
    choose_layer(tab, 1)
    set_time(tab, 59)
    victim = int(np.nonzero(other.drop_step[1] < T)[0][0])
    token(tab, victim, PANES[1]).click()
    settle(tab)
    for trace, pane in zip(pair, PANES, strict=True):
        assert tokens_with(tab, "selected", pane) == [victim]
        assert tokens_with(tab, "dropper", pane) == [
            s for s in [trace.drop_step[1, victim]] if s < T
        ]
    fates = tab.locator(".fate").all_inner_texts()
    assert len(fates) == 2
    assert f"(token {other.drop_step[1, victim]}," in fates[1]
    assert tab.locator(".curve").count() == 2
    screenshot(tab, "compare")


def test_differences_are_marked(visit, pair):
    one, other = pair
    tab = visit(one, against=other)
    for layer, t in ((0, 40), (2, 59)):
        choose_layer(tab, layer)
        set_time(tab, t)
        read = np.arange(T) <= t
        here, there = ((trace.drop_step[layer] > t) & read for trace in pair)
        only_here = np.nonzero(here & ~there & read)[0].tolist()
        only_there = np.nonzero(there & ~here & read)[0].tolist()
        assert tokens_with(tab, "only-here") == only_here
        assert tokens_with(tab, "only-there") == only_there
        assert tokens_with(tab, "only-here", PANES[1]) == only_there
        assert tokens_with(tab, "only-there", PANES[1]) == only_here
        share = round(100 * (here != there)[: t + 1].mean())
        assert f"in layer {layer}, {share} % of the tokens read" in tab.inner_text("#difference")
        assert only_here
    # all layers: a quarter more of them
    choose_layer(tab, None)
    alive = [(trace.drop_step > 59).sum(0) for trace in pair]
    assert tokens_with(tab, "only-here") == np.nonzero(alive[0] - alive[1] >= 0.75)[0].tolist()


def test_table_of_both(visit, pair):
    tab = visit(pair[0], against=pair[1])
    rows = {}
    for row in tab.locator("#compare-table tr").all():
        name, *values = row.locator("th, td").all_inner_texts()
        rows[name] = values
    assert rows[""] == ["adapter-80, threshold 0", "adapter-80, threshold 1"]
    assert rows["threshold"] == ["0", "1"]
    assert "protect_recent" not in rows  # both have the same
    assert "protect_recent 4" in tab.inner_text("#about")
    ends = [f"{round(100 * trace.sparsity[:, -1].mean())} %" for trace in pair]
    assert rows["of the earlier tokens dropped at the end"] == ends
    assert ends[0] != ends[1]
    losses = [np.nanmean(trace.loss) for trace in pair]
    assert [float(value) for value in rows["mean loss"]] == pytest.approx(losses, abs=0.004)


def test_lower_parts_show_the_chosen_one(visit, pair):
    tab = visit(pair[0], against=pair[1])
    choose_layer(tab, 1)

    def stays():
        settle(tab)
        return float(tab.get_attribute('#life-chart [data-name="stays"]', "data-share"))

    kept = [(trace.drop_step[1] >= T).mean() for trace in pair]
    assert stays() == pytest.approx(kept[0])
    held = tab.inner_text("#layer-note")
    tab.locator("#sides button").nth(1).click()
    assert stays() == pytest.approx(kept[1])
    assert tab.inner_text("#layer-note") != held
    # with the keyboard
    tab.keyboard.press("ArrowLeft")
    assert stays() == pytest.approx(kept[0])
    # both in the charts over positions
    assert tab.locator("#sparsity-chart polyline").count() == 2
    assert tab.locator("#cache-chart polyline").count() == 3


def test_texts_scroll_together(visit):
    long = [page_traces.voting_trace(T=900, threshold=threshold) for threshold in (0.0, 0.5)]
    tab = visit(long[0], against=long[1])
    tab.evaluate("document.getElementById('other-text').scrollTop = 310")
    tab.wait_for_timeout(400)
    tops = [tab.evaluate("p => document.querySelector(p).scrollTop", pane) for pane in PANES]
    assert tops[0] == tops[1] > 250


def test_phone_shows_one_text_at_a_time(visit, pair):
    tab = visit(pair[0], against=pair[1], viewport={"width": 390, "height": 844}, has_touch=True)
    assert tab.is_visible(PANES[0])
    assert not tab.is_visible(PANES[1])
    tab.locator("#sides button").nth(1).click()
    settle(tab)
    assert tab.is_visible(PANES[1])
    assert not tab.is_visible(PANES[0])
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screenshot(tab, "compare-phone")


def test_one_trace_has_no_comparison(visit, pair):
    tab = visit(pair[0])
    assert not tab.is_visible("#compare")
    assert not tab.is_visible("#sides")
    assert tab.locator("#other-text").count() == 0
