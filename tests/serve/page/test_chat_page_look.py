"""How the page looks, is operated and read aloud: contrast, phones, keys, scrolling, speed."""

import re

import pytest
from page_server import ANSWER, numbered
from visitor import answered, ask, strengths, wait_for_tokens

from browser import choose_layer, contrast, screenshot, settle, wait_until
from kvprune.explain.page import page_style
from kvprune.serve.page import FOLDER, chat_page

LOW = {"viewport": {"width": 900, "height": 460}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}


def test_page_is_small_and_alone():
    page = chat_page()
    assert len(page.encode()) < 80 * 1024
    assert not re.search(r"(?:src|href)=\"?(?:https?:)?//", page)
    for name in FOLDER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", name.read_text()
        )


def test_colours_are_those_of_the_explain_page():
    def colours(style):
        return [dict(re.findall(r"--([a-z]+): ([^;]+);", block)) for block in style.split("}")[:4]]

    ours = colours((FOLDER / "page.css").read_text())
    for own, theirs in zip(ours, colours(page_style()), strict=True):
        assert own.items() <= theirs.items()
    assert len(ours[0]) == 10


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_where_one_points(visit, theme):
    """At least 4.5 to 1: every token of the message under the pointer, and all other words."""
    tab, _ = visit(options={"color_scheme": theme})
    ask(tab)
    ask(tab, "And at night?")
    assert min(strengths(tab).values()) < 0.4
    style = """name => [...document.querySelectorAll(name)].filter(e => e.checkVisibility())
        .map(e => { const s = getComputedStyle(e), box = e.closest(".text");
          return [s.color, s.backgroundColor, box && getComputedStyle(box).backgroundColor,
                  e.className] })"""
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    for n in range(2):
        tab.locator(".message").nth(n).hover(position={"x": 5, "y": 5})
        settle(tab)
        wait_until(tab, "document.getAnimations().length === 0")
        tokens = tab.evaluate(style, f".message:nth-of-type({n + 1}) .t")
        assert len(tokens) > 5
        for text, background, under, name in tokens:
            on = under if under and under != "rgba(0, 0, 0, 0)" else paper
            assert contrast(mixed(text, on), background, on) >= 4.5, (text, background, name)
    for text, background, _, name in tab.evaluate(
        style, ".quiet, h1, h2, .tools button, .row .value"
    ):
        assert contrast(text, background, paper) >= 4.5, (text, name)


def mixed(text, under):
    """A colour with transparency as it is seen on another."""
    numbers = [float(n) for n in re.findall(r"-?[\d.]+(?:e-?\d+)?", text)]
    if len(numbers) < 4:
        return text
    scale = 255 if text.startswith("color(") else 1
    below = [float(n) for n in re.findall(r"[\d.]+", under)][:3]
    seen = [
        numbers[3] * scale * n + (1 - numbers[3]) * b for n, b in zip(numbers, below, strict=False)
    ]
    return f"rgb({seen[0]}, {seen[1]}, {seen[2]})"


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_appearance(visit, look):
    options = PHONE if look == "phone" else {"color_scheme": look}
    tab, _ = visit(options=options, layers=30)
    ask(tab)
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(20, 23, 28)" if look == "dark" else "rgb(251, 250, 248)")
    screenshot(tab, f"chat_{look}")
    tab.click("#theme")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != paper
    tab.reload()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != paper


@pytest.mark.parametrize("width", [390, 320])
def test_phone_needs_no_sideways_scrolling(visit, width):
    fits = "document.documentElement.scrollWidth <= innerWidth"
    tab, _ = visit(
        options={"viewport": {"width": width, "height": 740}, "has_touch": True}, layers=30
    )
    assert tab.evaluate(fits)
    tab.check("#compare")
    ask(tab, "A" * 200 + " why?")
    assert tab.evaluate(fits)
    # the layers are a row of their own that scrolls
    for button in tab.locator("button:not(.layer):visible").all():
        box = button.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width, button.inner_text()
    choose_layer(tab, 29)
    assert tab.inner_text("#layer-note").startswith("layer 29 holds")
    tab.locator(".side .t").nth(4).tap()
    settle(tab)
    assert tab.is_visible("#detail-body .big")
    tab.tap("#detail-close")
    settle(tab)
    assert not tab.is_visible("#detail")
    tab.tap("#panel-button")
    assert tab.is_visible("#memory-bars")
    assert tab.evaluate(fits)
    tab.tap("#panel-close")
    assert not tab.is_visible("#memory-bars")


def rest(tab):
    """Wait until nothing scrolls any more."""
    tab.evaluate("""async () => { for (let last = -1; last !== scrollY; ) { last = scrollY;
        await new Promise(done => setTimeout(done, 100)) } }""")


def test_scrolling_follows_until_the_reader_scrolls(visit):
    tab, server = visit(answer=lambda body: (ANSWER + "\n") * 12, hold_at=200, options=LOW)
    ask(tab, wait=False)
    wait_for_tokens(tab, 200)
    end = "document.documentElement.scrollHeight - innerHeight - scrollY"
    assert tab.evaluate(end) < 4
    tab.mouse.move(300, 400)
    tab.mouse.wheel(0, -150)
    wait_until(tab, f"{end} > 100")
    rest(tab)
    # of what is in view
    top = "document.querySelectorAll('.message.assistant .t')[120].getBoundingClientRect().top"
    place = tab.evaluate(top)
    assert 0 < place < 460
    server.release.set()
    answered(tab)
    assert tab.evaluate(top) == pytest.approx(place, abs=1)
    assert tab.evaluate(end) > 180


def test_button_leads_back_to_the_end(visit):
    tab, _ = visit(answer=lambda body: (ANSWER + "\n") * 12, hold_at=200, options=LOW)
    ask(tab, wait=False)
    wait_for_tokens(tab, 200)
    tab.mouse.move(300, 400)
    tab.mouse.wheel(0, -150)
    tab.wait_for_selector("#latest:visible")
    rest(tab)
    tab.click("#latest")
    assert tab.evaluate("document.documentElement.scrollHeight - innerHeight - scrollY") < 4


def test_answer_is_read_aloud_by_sentences_once(visit):
    tab, server = visit(hold_at=25)
    ask(tab, wait=False)
    wait_for_tokens(tab, 25)
    spoken = "[...document.querySelectorAll('#spoken p')].map(p => p.textContent)"
    sentences = re.findall(r"[^.]+\.", ANSWER)
    assert tab.evaluate(spoken) == [sentences[0]]
    server.release.set()
    answered(tab)
    assert tab.evaluate(spoken) == [*map(str.strip, sentences), "The answer is complete."]
    assert tab.get_attribute("#spoken", "aria-live") == "polite"
    # the text itself is no live region: every token would be read
    assert tab.evaluate("document.querySelector('.text').closest('[aria-live]')") is None


def test_keys(visit):
    tab, _ = visit()
    ask(tab)
    tab.focus("#prompt")
    tab.keyboard.type("]d,")
    assert tab.input_value("#prompt") == "]d,"
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("]")
    settle(tab)
    assert tab.get_attribute("#layers [aria-checked=true]", "aria-label") == "layer 0"
    tab.keyboard.press("[")
    tab.keyboard.press("[")
    settle(tab)
    assert tab.get_attribute("#layers [aria-checked=true]", "aria-label") == "layer 5"
    tab.keyboard.press("0")
    tab.keyboard.press(",")
    settle(tab)
    assert tab.locator(".t.now").count() == 1
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "prompt"
    # each text is one stop of the tab key
    stops = tab.evaluate("""[...document.querySelectorAll(".text")]
        .map(t => t.querySelectorAll(".t[tabindex='0']").length)""")
    assert stops == [1, 1]


def test_every_control_has_a_name(visit):
    tab, _ = visit()
    ask(tab)
    names = tab.evaluate("""[...document.querySelectorAll("button, input, textarea")]
        .filter(e => e.type !== "file").map(e => e.getAttribute("aria-label")
        || e.textContent.trim() || e.closest("label")?.textContent.trim() || e.outerHTML)""")
    assert len(names) > 20
    assert [name for name in names if name.startswith("<")] == []
    ids = tab.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_long_texts_are_quick(visit):
    """2,000 tokens × 30 layers, in CPU time of the page's thread: others on the machine are not."""
    prompt = " ".join(f"word{n}" for n in range(1900))

    def rule(layer, token, text, dropper, at_mark):
        return dropper == token + 40 + layer

    tab, _ = visit(layers=30, rule=rule, answer=lambda body: ANSWER * 2)
    session = tab.context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds():
        metrics = session.send("Performance.getMetrics")["metrics"]
        return {metric["name"]: metric["value"] for metric in metrics}["TaskDuration"]

    before = seconds()
    tab.evaluate("words => { document.getElementById('prompt').value = words }", prompt)
    tab.focus("#prompt")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#send:visible", timeout=60_000)
    settle(tab)
    spent = (seconds() - before) / len(numbered(ANSWER * 2))
    before = seconds()
    for layer in range(5):
        choose_layer(tab, layer)
    each = (seconds() - before) / 5
    print(f"{1000 * spent:.0f} ms per token, {1000 * each:.0f} ms per layer")
    assert spent < 0.05
    assert each < 0.25
