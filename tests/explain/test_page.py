"""The page in a real browser: it shows what is in the trace."""

import json
import re

import numpy as np
import pytest

import traces
from browser import choose_layer, screenshot, set_time, settle, token, tokens_with, wait_for_time
from kvprune import NEVER
from kvprune.explain.page import FOLDER, SCRIPTS, notebook_summary, render_page
from kvprune.explain.token_text import KINDS

HOSTILE = (
    "</script>", "<img src=x onerror=window.bad=1>", "<!--", "<script>window.bad=1</script>",
    "&lt;", "\u2028", "%%DATA%%", "'];window.bad=1;//", "", "", "😀", " שלום", "\n", "{{x}}",
)  # fmt: skip


def test_slider_and_layers_show_the_trace(visit):
    trace = traces.random_trace(4, 120)
    tab = visit(trace)
    for layer in (2, 0):
        choose_layer(tab, layer)
        for t in (119, 60, 61, 0, 90):
            set_time(tab, t)
            step = trace.drop_step[layer]
            j = np.arange(120)
            held = j[(j <= t) & (step > t)].tolist()
            assert tokens_with(tab, "held") == held
            assert tokens_with(tab, "gone") == j[(j <= t) & (step <= t)].tolist()
            assert tokens_with(tab, "future") == j[j > t].tolist()
            assert tokens_with(tab, "now") == [t]
            note = tab.inner_text("#layer-note")
            assert note == f"layer {layer} holds {len(held)} of {t + 1} tokens"
    choose_layer(tab, None)
    set_time(tab, 80)
    alive = (trace.drop_step[:, :81] > 80).mean(0)
    script = "() => [...document.querySelectorAll('#text .t')].map(t => t.style.cssText)"
    shown = [float(re.search(r"--alive: ([\d.]+)", css)[1]) for css in tab.evaluate(script)[:81]]
    assert shown == pytest.approx(alive.tolist(), abs=0.006)
    assert "hold" in tab.inner_text("#layer-note")


def test_every_token_is_in_the_text(visit):
    trace = traces.random_trace(2, 60)
    tab = visit(trace)
    assert tab.text_content("#text") == trace.text
    script = "() => [...document.querySelectorAll('#text .t')].map(t => t.textContent)"
    # the blank before a word is beside its span
    assert tab.evaluate(script) == [token.lstrip(" ") for token in trace.tokens]


def test_hover_and_selection_name_dropper_and_dropped(visit):
    trace = traces.random_trace(3, 80, seed=3)
    tab = visit(trace)
    layer = 1
    choose_layer(tab, layer)
    counts = np.bincount(trace.drop_step[layer][trace.drop_step[layer] < NEVER], minlength=80)
    busy = int(counts.argmax())
    token(tab, busy).hover()
    victims = trace.dropped_by(busy, layer)
    assert tokens_with(tab, "dropped") == victims
    assert f"It dropped {len(victims)}" in tab.inner_text(".dropped-list")
    listed = tab.evaluate(
        "[...document.querySelectorAll('.dropped-list .token')].map(b => +b.dataset.i)"
    )
    assert listed == victims
    victim = victims[0]
    token(tab, victim).click()
    assert tokens_with(tab, "dropper") == [busy]
    assert f"(token {busy}," in tab.inner_text(".fate")
    keepers = np.nonzero(trace.drop_step[:, victim] == NEVER)[0].tolist()
    sentence = tab.inner_text(".lives")
    assert sentence == (
        f"Kept to the end in {'layer' if len(keepers) == 1 else 'layers'} "
        f"{', '.join(map(str, keepers))}."
        if keepers else "No layer keeps it to the end."
    )  # fmt: skip
    tab.mouse.move(5, 5)
    assert tokens_with(tab, "selected") == [victim]
    assert tab.locator(".threads path").count() == 1 + len(trace.dropped_by(victim, layer))
    screenshot(tab, "selected")
    # all layers: the droppers of every layer
    choose_layer(tab, None)
    droppers = sorted({int(s) for s in trace.drop_step[:, victim] if s < 80})
    assert tokens_with(tab, "dropper") == droppers
    tab.keyboard.press("Escape")
    assert tokens_with(tab, "selected") == []


def test_arcs_of_all_layers_are_those_of_one_token(visit):
    """Without a choice: of the token that has dropped most."""
    trace = traces.random_trace(3, 80, seed=3)
    tab = visit(trace)
    counts = np.bincount(trace.drop_step[trace.drop_step < NEVER], minlength=80)
    assert f"(token {counts.argmax()}, which dropped most)" in tab.inner_text("#arcs-note")
    set_time(tab, 30)
    assert f"(token {counts[:31].argmax()}, which dropped most)" in tab.inner_text("#arcs-note")
    token(tab, 12).click()
    settle(tab)
    assert "(token 12)" in tab.inner_text("#arcs-note")
    choose_layer(tab, 1)
    assert tab.inner_text("#arcs-note").startswith("an arc from each dropper")


def checked(tab):
    return tab.get_attribute('#layers [aria-checked="true"]', "aria-label")


def test_keyboard(visit):
    trace = traces.random_trace(3, 80)
    tab = visit(trace)
    tab.keyboard.press("0")
    settle(tab)
    assert checked(tab) == "all layers"
    tab.keyboard.press("]")
    settle(tab)
    assert checked(tab) == "layer 0"
    tab.keyboard.press("[")
    tab.keyboard.press("[")
    settle(tab)
    assert checked(tab) == "layer 2"
    tab.keyboard.press(",")
    tab.keyboard.press(",")
    assert tokens_with(tab, "now") == [77]
    tab.keyboard.press(".")
    assert tokens_with(tab, "now") == [78]
    # reach the text with the tab key, then move with the arrow keys
    for _ in range(20):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.classList.contains('t')"):
            break
    assert tokens_with(tab, "focus") == [0]
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowLeft")
    assert tokens_with(tab, "focus") == [2]
    tab.keyboard.press("Enter")
    assert tokens_with(tab, "selected") == [2]
    assert "token 2," in tab.inner_text("#detail")
    tab.keyboard.press("End")
    assert tokens_with(tab, "focus") == [79]
    tab.keyboard.press("ArrowUp")
    assert tokens_with(tab, "focus")[0] < 79
    tab.keyboard.press("m")
    assert tab.evaluate("document.getElementById('large').open")
    title = tab.inner_text("#large-title")
    tab.keyboard.press("ArrowRight")
    assert tab.inner_text("#large-title") != title
    tab.keyboard.press("Escape")
    assert not tab.evaluate("document.getElementById('large').open")
    tab.keyboard.press("?")
    assert tab.is_visible("#help dl")


def test_play_runs_to_the_end_and_can_be_paused(visit):
    tab = visit(traces.random_trace(2, 30))
    tab.click("#play")
    settle(tab)
    assert tab.get_attribute("#play", "aria-label") == "Pause"
    assert tokens_with(tab, "now")[0] < 15
    wait_for_time(tab, 5)
    tab.click("#play")
    paused = tokens_with(tab, "now")
    assert paused[0] < 29
    tab.wait_for_timeout(400)
    assert tokens_with(tab, "now") == paused
    tab.click("#play")
    wait_for_time(tab, 29)
    settle(tab)
    assert tab.get_attribute("#play", "aria-label") == "Play"


@pytest.mark.parametrize("T", [9, 120])
def test_masks_equal_those_of_the_trace(visit, T):
    trace = traces.random_trace(3, T)
    tab = visit(trace)
    tab.locator("#masks button").nth(1).click()
    settle(tab)
    assert tab.inner_text("#large-title").startswith("Layer 1: ")
    script = """() => { const c = document.getElementById('large-mask');
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        return [c.width, [...d]] }"""
    size, values = tab.evaluate(script)
    assert size == T  # one pixel per pair
    image = np.array(values).reshape(T, T, 4)
    mask = trace.visible(1)
    assert np.array_equal(image[..., 3] > 0, np.tril(np.ones((T, T), dtype=bool)))
    seen, empty = image[0, 0, :3], tab.evaluate("[0xec, 0xe9, 0xe3]")
    assert (image[mask][:, :3] == seen).all()
    gone = np.tril(~mask)
    assert (image[gone][:, :3] == empty).all()
    assert gone.any()
    # pointing at a dropped pair names the dropper
    k, j = np.argwhere(gone)[len(np.argwhere(gone)) // 2]
    box = tab.locator("#large-mask").bounding_box()
    cell = box["width"] / T
    tab.mouse.move(box["x"] + (j + 0.5) * cell, box["y"] + (k + 0.5) * cell)
    settle(tab)
    note = tab.inner_text("#large-note")
    assert f"({k}) cannot see" in note
    assert f"({trace.drop_step[1, j]}) dropped it." in note
    screenshot(tab, f"mask-{T}")


def test_statistics_against_loops(visit):
    trace = traces.random_trace(3, 90)
    tab = visit(trace)
    data = json.loads(tab.inner_text("#data") or tab.text_content("#data"))

    def rows(host):
        script = (
            "h => [...document.querySelectorAll(h)].map(r => [r.dataset.name, r.dataset.share])"
        )
        return {name: float(share) for name, share in tab.evaluate(script, f"{host} .row")}

    for layer in (1, None):
        choose_layer(tab, layer)
        layers = range(3) if layer is None else [layer]
        drops = [(l, j, int(s)) for l in layers for j, s in enumerate(trace.drop_step[l]) if s < 90]
        kinds = rows("#kind-chart")
        for name, share in kinds.items():
            count = sum(KINDS[data["kind"][s]] == name for _, _, s in drops)
            assert share == pytest.approx(count / len(drops))
        assert set(kinds) == set(KINDS)
        part = [data["speeches"][s] for s in data["speech"]] or [KINDS[k] for k in data["kind"]]
        for name, share in rows("#speech-chart").items():
            pairs = [(l, j, k) for l in layers for j in range(90) for k in range(j + 1, 90)
                     if part[j] == name]  # fmt: skip
            seen = [k < trace.drop_step[l, j] for l, j, k in pairs]
            assert share == pytest.approx(sum(seen) / len(pairs))
        lives = rows("#life-chart")
        total = 90 * len(layers)
        assert lives["stays"] == pytest.approx(1 - len(drops) / total)
        assert lives["4–7"] == pytest.approx(sum(4 <= s - j < 8 for _, j, s in drops) / total)
    set_time(tab, 44)
    kept, dense = trace.kept[:, 44].sum() * 100 / 1024, 3 * 45 * 90 / 1024
    assert kept < 10 < dense  # values below ten have a decimal
    note = f"{kept:.1f} KiB of {dense:.0f} KiB dense at token 44"
    assert tab.inner_text("#cache-note") == note
    mean = trace.sparsity[:, 44].mean()
    assert f"all layers: {round(100 * mean)} %" in tab.inner_text("#sparsity-note")


def test_hostile_tokens_are_shown_as_text(visit):
    trace = traces.random_trace(2, len(HOSTILE), tokens=HOSTILE)
    tab = visit(trace, title="<b onclick=x>&amp;")
    for i in range(len(HOSTILE)):
        tab.evaluate("i => document.querySelectorAll('#text .t')[i].focus()", i)
        settle(tab)
    assert tab.text_content("#text") == "".join(HOSTILE)
    assert tab.evaluate("window.bad") is None
    assert tab.locator("#text img, #detail img, #text script").count() == 0
    assert tab.inner_text("h1") == "<b onclick=x>&amp;"
    screenshot(tab, "hostile")


def test_content_security_policy(visit):
    """A script, an event handler and a request that are added later are refused."""
    tab = visit(traces.random_trace(1, 3))
    tab.evaluate("""() => { const s = document.createElement("script");
        s.textContent = "window.bad = 1"; document.body.append(s);
        const d = document.createElement("div"); document.body.append(d);
        d.innerHTML = "<img src=https://example.org/x onerror='window.bad = 1'>" }""")
    tab.wait_for_timeout(100)
    assert tab.evaluate("window.bad") is None
    refused = [problem for problem in visit.problems if "Content Security Policy" in problem]
    assert any("inline script" in problem for problem in refused)
    assert any("event handler" in problem for problem in refused)
    assert any("https://example.org/x" in problem for problem in refused)
    visit.problems.clear()


@pytest.mark.parametrize(("T", "L"), [(1, 1), (2, 1)])
def test_smallest_traces(visit, T, L):
    tab = visit(traces.random_trace(L, T))
    tab.click("#play")
    settle(tab)
    tab.keyboard.press("m")
    assert tokens_with(tab, "t") == list(range(T))


def test_page_needs_no_other_file():
    text = render_page(traces.random_trace(2, 10))
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "%%" not in text
    assert all(word not in text for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval("))
    files = {file.name for file in FOLDER.glob("*.js")}
    assert set(SCRIPTS) == files


def test_embedded_data_stays_in_its_block():
    text = render_page(traces.random_trace(1, len(HOSTILE), tokens=HOSTILE))
    block = text.split('id="data">')[1].split("</script>")[0]
    assert tuple(json.loads(block)["tokens"]) == HOSTILE
    assert not set("<>&\u2028") & set(block)


def test_notebook_summary_is_escaped():
    trace = traces.random_trace(4, len(HOSTILE), tokens=HOSTILE)
    shown = notebook_summary(trace)
    assert "<img" not in shown
    assert "&lt;img src=x" in shown
    gone = int((trace.drop_step[:, 3] < NEVER).sum())
    assert f"token 3: dropped in {gone} of 4 layers" in shown
    assert trace._repr_html_() == shown
    assert "and 3 more tokens" in notebook_summary(traces.random_trace(1, 10), max_tokens=7)
