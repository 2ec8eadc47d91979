"""Why a token was dropped, in a real browser: scores, margins, runners-up, the curve."""

import re

import numpy as np
import pytest

import page_traces
import traces
from browser import choose_layer, screenshot, settle, token
from kvprune import NEVER

LATER = 60


@pytest.fixture(scope="module")
def trace():
    return page_traces.voting_trace(L=3, T=LATER, seed=5)


def dropped_token(trace, layer, runners):
    """The first token with this many runners-up."""
    found = (trace.runner_steps[layer] < NEVER).sum(-1)
    return int(np.nonzero((trace.drop_step[layer] < NEVER) & (found == runners))[0][0])


def number(text):
    return float(text.replace("−", "-"))


@pytest.mark.parametrize("runners", [0, 2, 3])
def test_score_margin_and_runners_up_of_a_drop(visit, trace, runners):
    tab = visit(trace)
    layer = 1
    j = dropped_token(trace, layer, runners)
    choose_layer(tab, layer)
    token(tab, j).click()
    settle(tab)
    score, margin = trace.score[layer, j], trace.margin[layer, j]
    found = re.match(r"Score (−?[\d.]+): ([\d.]+) below the threshold, 0\.",
                     tab.inner_text(".reason"))  # fmt: skip
    assert number(found[1]) == pytest.approx(score, abs=0.015)
    assert number(found[2]) == pytest.approx(margin, abs=0.015)
    told = tab.inner_text(".runners")
    listed = tab.evaluate(
        "[...document.querySelectorAll('.runners .token')].map(b => +b.dataset.i)"
    )
    assert listed == trace.runners_up(j, layer)
    scores = [number(found) for found in re.findall(r"later, (−?[\d.]+)\)", told)]
    assert scores == pytest.approx(trace.runner_scores[layer, j, :runners].tolist(), abs=0.015)
    if not runners:
        assert told == "No later token would have dropped it."


def curve_scores(tab):
    """The scores that the curve shows, from its pixels and its ticks: {distance: score}."""
    return tab.evaluate("""() => {
      const svg = document.querySelector(".curve"), at = (t, name) => Number(t.getAttribute(name));
      const value = (t) => Number(t.textContent.replace("−", "-"));
      const ticks = (anchor) => [...svg.querySelectorAll(`text.tick[text-anchor=${anchor}]`)]
        .map((t) => ({ value: value(t), x: at(t, "x"), y: at(t, "y") }))
        .filter(({ value }) => !Number.isNaN(value));
      const slope = ([a, b], axis) => (b.value - a.value) / (b[axis] - a[axis]);
      const scores = ticks("end"), distances = ticks("middle");
      const points = [...svg.querySelectorAll("polyline")]
        .flatMap((line) => line.getAttribute("points").split(" ").filter(Boolean))
        .map((point) => point.split(",").map(Number));
      return Object.fromEntries(points.map(([x, y]) => [
        Math.round(distances[0].value + (x - distances[0].x) * slope(distances, "x")),
        // the label of a score is four pixels below its line
        scores[0].value + (y + 4 - scores[0].y) * slope(scores, "y"),
      ]));
    }""")


@pytest.mark.parametrize("fate", ["dropped", "kept"])
def test_curve_shows_the_score_of_every_later_token(visit, trace, fate):
    tab = visit(trace)
    layer = 0
    steps = trace.drop_step[layer, : LATER // 2]
    j = int(np.nonzero((steps < NEVER) == (fate == "dropped"))[0][0])
    choose_layer(tab, layer)
    token(tab, j).click()
    tab.click("#why-range")
    settle(tab)
    shown = {j + int(distance): score for distance, score in curve_scores(tab).items()}
    assert sorted(shown) == list(range(j + 1, LATER))
    want = trace.scores(j, layer)
    span = np.nanmax(want) - np.nanmin(want)
    got = np.array([shown[i] for i in range(j + 1, LATER)])
    np.testing.assert_allclose(got, want[j + 1 :], atol=0.03 * span)
    assert tab.locator(".curve .threshold").count() == 1
    # distances 1 to 4 are protected
    protected = tab.locator(".curve .protected").bounding_box()
    box = tab.locator(".curve").bounding_box()
    last = protected["x"] + protected["width"] - box["x"]
    assert last == pytest.approx(44 + (box["width"] - 54) * 4.5 / (LATER - 1 - j), abs=2)
    drops = tab.locator(".curve .drop")
    runners = tab.evaluate("[...document.querySelectorAll('.runner')].map(r => +r.dataset.step)")
    if fate == "dropped":
        assert int(drops.get_attribute("data-step")) == trace.drop_step[layer, j]
        told = number(drops.get_attribute("data-score"))
        assert told == pytest.approx(trace.score[layer, j], abs=0.015)
        assert runners == trace.runners_up(j, layer)
    else:
        assert drops.count() == 0
        assert "No score on it was as low as the threshold" in tab.inner_text(".reason")
    screenshot(tab, f"why-{fate}")


def test_rounded_curves_do_not_contradict_what_happened(visit, trace, monkeypatch):
    """With few bytes for the scores, votes that dropped nothing still stay above the threshold."""
    from kvprune.explain import page

    short = 0
    real = page.page_scores
    monkeypatch.setattr(page, "page_scores", lambda votes, room: real(votes, 700))
    tab = visit(trace)
    for layer in range(3):
        choose_layer(tab, layer)
        for j in range(2, 30, 9):
            token(tab, j).click()
            settle(tab)
            shown = curve_scores(tab)
            drop = min(int(trace.drop_step[layer, j]), LATER)
            low = [score for distance, score in shown.items() if 4 < int(distance) < drop - j]
            assert min(low, default=1) > -0.05
            if drop < LATER and str(drop - j) in shown:
                assert shown[str(drop - j)] == pytest.approx(trace.score[layer, j], abs=0.1)
                short += 1
    assert short
    assert "root mean square error 0." in tab.inner_text("#why-note")


def test_pointing_at_the_curve_names_the_token_and_its_vote(visit, trace):
    tab = visit(trace)
    layer = 1
    j = dropped_token(trace, layer, 3)
    choose_layer(tab, layer)
    token(tab, j).click()
    settle(tab)
    drop = int(trace.drop_step[layer, j])
    tab.locator(".curve").scroll_into_view_if_needed()
    box = tab.locator(".curve .drop").bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    settle(tab)
    assert f"(token {drop}, {drop - j} later)" in tab.inner_text("#why-note")
    assert "votes to drop it" in tab.inner_text("#why-note")
    tab.mouse.down()
    tab.mouse.up()
    settle(tab)
    assert int(tab.input_value("#time")) == drop


def test_all_layers_are_a_map_of_rows(visit, trace):
    tab = visit(trace)
    j = dropped_token(trace, 2, 3)
    token(tab, j).click()
    settle(tab)
    tab.locator(".map").scroll_into_view_if_needed()
    box = tab.locator(".map").bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5 + 2.5 * 7)
    settle(tab)
    assert tab.inner_text("#why-note").startswith("layer 2, ")
    found = re.search(r"\(token (\d+), .*\): (−?[\d.]+)$", tab.inner_text("#why-note"))
    want = trace.scores(j, 2)[int(found[1])]
    assert number(found[2]) == pytest.approx(want, abs=0.15)
    screenshot(tab, "why-map")
    # each layer in a table, too
    tab.locator(".by-layer summary").click()
    rows = tab.locator(".by-layer tr")
    assert rows.count() == 3
    cells = rows.nth(2).locator("td").all_inner_texts()
    assert cells[2] == f"{trace.drop_step[2, j] - j} later"
    assert number(cells[3]) == pytest.approx(trace.score[2, j], abs=0.015)
    # a click on a row chooses its layer
    tab.mouse.click(box["x"] + box["width"] / 2, box["y"] + 5 + 2.5 * 7)
    settle(tab)
    assert tab.get_attribute('#layers [aria-checked="true"]', "aria-label") == "layer 2"


def test_first_tokens_are_said_to_be_protected(visit):
    trace = page_traces.voting_trace(protect_first=3)
    tab = visit(trace)
    choose_layer(tab, 0)
    token(tab, 1).click()
    settle(tab)
    assert tab.inner_text(".reason") == "It is one of the first 3 tokens, which are protected."
    assert "protect_first 3: the first 3 tokens stay." in tab.inner_text("#life-rule")


def test_page_says_what_a_plain_trace_lacks(visit):
    tab = visit(traces.random_trace(2, 20))
    token(tab, 3).click()
    settle(tab)
    assert tab.inner_text(".why-chart") == "There are no scores: this trace has no votes recorded."
    assert "kvprune explain --cost" in tab.inner_text(".no-loss")
    assert not tab.is_visible("#cost-list")
    assert not tab.is_visible("#strip-label")


def test_a_method_without_votes_is_named(visit):
    plain = traces.random_trace(2, 20)
    trace = plain.__class__(**{**vars(plain), "settings": {"method": "tova"}})
    tab = visit(trace)
    assert tab.inner_text(".why-chart") == "There are no scores: tova drops without votes."


def test_adapter_settings_and_both_shares_are_named(visit, trace):
    tab = visit(trace)
    about = tab.inner_text("#about")
    assert "adapter-80 on base" in about
    assert "pruning, threshold 0, protect_first 0, protect_recent 4" in about
    end = trace.sparsity[:, -1].mean()
    pairs = np.mean([~trace.visible(l)[np.tri(LATER, k=-1, dtype=bool)] for l in range(3)])
    assert f"{end:.0%} of the earlier tokens dropped at the end".replace("%", " %") in about
    assert about.endswith(f"{pairs:.0%} over all pairs".replace("%", " %"))
    distance = trace.drop_step - np.arange(LATER)
    dropped = trace.drop_step < NEVER
    first = (distance[dropped] == 5).mean()
    assert tab.inner_text("#life-rule") == (
        f"protect_recent 4: nothing can be dropped before distance 5; {round(100 * first)} % of "
        f"the drops come at 5, the first allowed."
    )
    assert first > 0
    share = ~trace.visible(1)[np.tri(LATER, k=-1, dtype=bool)]
    tab.locator("#masks button").nth(1).click()
    settle(tab)
    percent = f"{round(100 * share.mean())} %"
    assert tab.inner_text("#large-title") == f"Layer 1: {percent} dropped over all pairs"


def test_page_without_decompression_says_so(visit, trace):
    tab = visit(trace, before="delete window.DecompressionStream")
    assert "cannot unpack" in tab.inner_text("#trouble")
    assert tab.get_attribute("html", "data-ready") is None
