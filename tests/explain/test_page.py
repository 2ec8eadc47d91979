"""The page in a real browser: it shows what is in the trace."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import traces
from kvprune import NEVER
from kvprune.explain.page import SCRIPTS, notebook_summary, render_page
from kvprune.explain.token_text import KINDS

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
HOSTILE = (
    "</script>", "<img src=x onerror=window.bad=1>", "<!--", "<script>window.bad=1</script>",
    "&lt;", "\u2028", "%%DATA%%", "'];window.bad=1;//", "", "", "😀", " שלום", "\n", "{{x}}",
)  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        # the sandbox does not work for root in a container
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open the page of a trace; any error, console message or other request fails the test."""
    problems, contexts = [], []

    def open_page(trace, title="", count_time=False, **options):
        file = trace.to_html(tmp_path / "page.html", title)
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        tab = context.new_page()
        if count_time:
            tab.session = context.new_cdp_session(tab)
            tab.session.send("Performance.enable", {"timeDomain": "threadTicks"})
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("request", lambda request: problems.append(request.url)
               if request.url != file.as_uri() else None)  # fmt: skip
        tab.goto(file.as_uri())
        tab.wait_for_selector("html[data-ready]")
        return tab

    open_page.problems = problems
    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def screenshot(tab, name):
    """Saved to the folder KVPRUNE_SHOTS, if set, for people to look at."""
    if folder := os.environ.get("KVPRUNE_SHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tab.screenshot(path=Path(folder) / f"{name}.png")


def settle(tab):
    """Wait for two frames: a change is drawn in the next one."""
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def tokens_with(tab, name):
    settle(tab)
    script = "name => [...document.querySelectorAll(`#text .t.${name}`)].map(t => +t.dataset.i)"
    return tab.evaluate(script, name)


def set_time(tab, t):
    tab.evaluate(
        "t => { const s = document.getElementById('time'); s.value = t;"
        " s.dispatchEvent(new Event('input')) }", t,
    )  # fmt: skip
    settle(tab)


def wait_for_time(tab, t):
    for _ in range(200):
        if int(tab.input_value("#time")) >= t:
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"token {t} was never reached")


def choose_layer(tab, layer):
    tab.locator("#layers button").nth(layer).click()
    settle(tab)


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
    choose_layer(tab, 4)
    set_time(tab, 80)
    alive = (trace.drop_step[:, :81] > 80).mean(0)
    script = "() => [...document.querySelectorAll('#text .t')].map(t => t.style.cssText)"
    shown = [float(css.split(":")[1].strip(" ;")) for css in tab.evaluate(script)[:81]]
    assert shown == pytest.approx(alive.tolist(), abs=0.006)
    assert "hold" in tab.inner_text("#layer-note")


def test_every_token_is_in_the_text(visit):
    trace = traces.random_trace(2, 60)
    tab = visit(trace)
    script = "() => [...document.querySelectorAll('#text .t')].map(t => t.textContent)"
    assert tuple(tab.evaluate(script)) == trace.tokens


def test_hover_and_selection_name_dropper_and_dropped(visit):
    trace = traces.random_trace(3, 80, seed=3)
    tab = visit(trace)
    layer = 1
    choose_layer(tab, layer)
    counts = np.bincount(trace.drop_step[layer][trace.drop_step[layer] < NEVER], minlength=80)
    busy = int(counts.argmax())
    tab.locator("#text .t").nth(busy).hover()
    victims = trace.dropped_by(busy, layer)
    assert tokens_with(tab, "dropped") == victims
    assert f"It dropped {len(victims)}" in tab.inner_text("#dropped-list")
    listed = tab.evaluate(
        "[...document.querySelectorAll('#dropped-list .token')].map(b => +b.dataset.i)"
    )
    assert listed == victims
    victim = victims[0]
    tab.locator("#text .t").nth(victim).click()
    assert tokens_with(tab, "dropper") == [busy]
    assert f"(token {busy}," in tab.inner_text("#fate")
    keepers = np.nonzero(trace.drop_step[:, victim] == NEVER)[0].tolist()
    sentence = tab.inner_text("#lives")
    assert sentence == (
        f"Kept to the end in {'layer' if len(keepers) == 1 else 'layers'} "
        f"{', '.join(map(str, keepers))}."
        if keepers else "No layer keeps it to the end."
    )  # fmt: skip
    tab.mouse.move(5, 5)
    assert tokens_with(tab, "selected") == [victim]
    assert tab.locator("#threads path").count() == 1 + len(trace.dropped_by(victim, layer))
    screenshot(tab, "selected")
    # all layers: the droppers of every layer
    choose_layer(tab, 3)
    droppers = sorted({int(s) for s in trace.drop_step[:, victim] if s < 80})
    assert tokens_with(tab, "dropper") == droppers
    tab.keyboard.press("Escape")
    assert tokens_with(tab, "selected") == []


def test_keyboard(visit):
    trace = traces.random_trace(3, 80)
    tab = visit(trace)
    tab.keyboard.press("0")
    settle(tab)
    assert tab.get_attribute("#layers button:nth-child(4)", "aria-checked") == "true"
    tab.keyboard.press("]")
    settle(tab)
    assert tab.get_attribute("#layers button:nth-child(1)", "aria-checked") == "true"
    tab.keyboard.press("[")
    tab.keyboard.press("[")
    settle(tab)
    assert tab.get_attribute("#layers button:nth-child(3)", "aria-checked") == "true"
    tab.keyboard.press(",")
    tab.keyboard.press(",")
    assert tokens_with(tab, "now") == [77]
    tab.keyboard.press(".")
    assert tokens_with(tab, "now") == [78]
    # reach the text with the tab key, then move with the arrow keys
    for _ in range(12):
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

    for layer in (1, 3):
        choose_layer(tab, layer)
        layers = range(3) if layer == 3 else [layer]
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
    script = "() => [...document.querySelectorAll('#text .t')].map(t => t.textContent)"
    assert tuple(tab.evaluate(script)) == HOSTILE
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


def test_large_traces_are_quick(visit):
    """2,000 tokens × 30 layers: two seconds to load, a few frames per change.

    Measured in CPU time of the page's thread, so that a busy machine does not fail it.
    """
    tab = visit(traces.random_trace(30, 2000), count_time=True)

    def seconds():
        metrics = tab.session.send("Performance.getMetrics")["metrics"]
        return {metric["name"]: metric["value"] for metric in metrics}["TaskDuration"]

    loaded = seconds()
    jumps = 20
    for n in range(jumps):
        set_time(tab, (n * 577) % 2000)
    jump = (seconds() - loaded) / jumps
    before = seconds()
    for n in range(jumps):
        choose_layer(tab, n)
    layer = (seconds() - before) / jumps
    print(f"loaded after {loaded:.2f} s; {jump:.3f} s per jump in time, {layer:.3f} s per layer")
    assert 0 < loaded < 2
    assert jump < 0.1
    assert layer < 0.2
    screenshot(tab, "large")


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_appearance(visit, look):
    options = {"color_scheme": "dark" if look == "dark" else "light"}
    if look == "phone":
        options |= {"viewport": {"width": 390, "height": 844}, "has_touch": True}
    tab = visit(traces.random_trace(6, 200), **options)
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 28)" if look == "dark" else "rgb(251, 250, 248)")
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    tab.locator("#text .t").nth(20).click()
    settle(tab)
    assert tab.is_visible("#detail-body .big")
    screenshot(tab, look)
    tab.keyboard.press("d")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != paper


def test_page_needs_no_other_file():
    text = render_page(traces.random_trace(2, 10))
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "%%" not in text
    assert all(word not in text for word in ("innerHTML", "outerHTML", "insertAdjacent", "eval("))
    assert len(SCRIPTS) == 6


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
