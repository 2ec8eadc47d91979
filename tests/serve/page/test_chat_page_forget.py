"""Watching it forget: how faint each token is, by whom it was dropped, memory, the batch."""

import json

import pytest
from page_server import ANSWER, BYTES, busy_rows, numbered, template
from visitor import (
    FLOOR,
    answered,
    ask,
    drops_of,
    press,
    share_held,
    strengths,
    texts,
    wait_for_tokens,
)

from browser import choose_layer, set_time, settle, wait_until


def strength(share):
    return pytest.approx(FLOOR + (1 - FLOOR) * share, abs=0.005)


def test_tokens_fade_with_the_share_of_layers_that_hold_them(visit):
    tab, server = visit()
    ask(tab)
    drops, last = drops_of(server), len(server.known["cmpl-1"]) - 1
    seen = strengths(tab)
    assert set(seen) == set(range(last + 1))
    shares = {i: share_held(server, drops, i, last) for i in seen}
    assert seen == {i: strength(share) for i, share in shares.items()}
    assert len(set(shares.values())) > 3


@pytest.mark.parametrize("layer", [0, 4])
def test_one_layer_holds_a_token_or_not(visit, layer):
    tab, server = visit()
    ask(tab)
    drops = drops_of(server)
    choose_layer(tab, layer)
    seen = strengths(tab)
    assert seen == {i: strength((layer, i) not in drops) for i in seen}
    held = sum((layer, i) not in drops for i in range(len(seen) - 1))
    assert tab.inner_text("#layer-note") == f"layer {layer} holds {held} of {len(seen) - 1} tokens"
    choose_layer(tab, None)
    assert strengths(tab) != seen


def test_tokens_fade_while_the_answer_is_written(visit):
    # the fourth token of the answer drops every earlier one, everywhere but in the last layer
    first = len(numbered(template([{"role": "user", "content": "Hi"}])))

    def rule(layer, token, text, dropper, at_mark):
        return dropper == first + 3 and layer < 5

    tab, server = visit(hold_at=4, rule=rule)
    ask(tab, "Hi", wait=False)
    wait_for_tokens(tab, 4)
    before = strengths(tab)
    assert set(before.values()) == {1.0}
    server.hold_at = 5
    server.release.set()
    answered(tab)
    after = strengths(tab)
    assert all(after[i] == strength(1 / 6) for i in range(first + 3))
    assert all(after[i] == 1 for i in range(first + 3, len(after)))


def test_scrubber_shows_what_was_held_then(visit):
    tab, server = visit()
    ask(tab)
    drops, T = drops_of(server), len(server.known["cmpl-1"])
    # two at which tokens are dropped
    for time in sorted(set(drops.values()))[1:8:5]:
        set_time(tab, time)
        seen = strengths(tab)
        for i in range(time):
            assert seen[i] == strength(share_held(server, drops, i, time)), (i, time)
        future = tab.evaluate("[...document.querySelectorAll('.t.future')].map(t => +t.dataset.i)")
        assert sorted(future) == list(range(time + 1, T))
        assert tab.get_attribute(".t.now", "data-i") == str(time)
        assert tab.inner_text("#now").startswith(f"token {time},")
    tab.click("#live")
    settle(tab)
    assert tab.locator(".t.future, .t.now").count() == 0


def test_play_goes_to_the_end(visit):
    tab, _ = visit(answer=lambda body: "One two.")
    ask(tab, "Hi")
    tab.click("#play")
    wait_until(tab, "document.querySelectorAll('.t.future').length > 0")
    wait_until(tab, "document.getElementById('play').getAttribute('aria-label') === 'Play'")
    assert tab.locator(".t.future").count() == 0


@pytest.mark.parametrize("way", ["pointer", "keyboard"])
def test_token_tells_who_dropped_it_and_where(visit, way):
    def rule(layer, token, text, dropper, at_mark):
        return (token, dropper) == (15, 18) and layer in (0, 1, 2, 4)

    tab, server = visit(rule=rule)
    ask(tab)
    tokens = server.known["cmpl-1"]
    if way == "pointer":
        tab.hover(".t[data-i='15']")
    else:
        tab.evaluate("document.querySelector('.t[data-i=\"14\"]').focus()")
        tab.keyboard.press("ArrowRight")
    settle(tab)
    told = tab.inner_text("#detail-body")
    assert f"“{tokens[15]['text'].strip()}”" in told
    assert "token 15, answer" in told
    assert "2 of 6 layers hold it." in told
    dropper = tokens[18]["text"].strip()
    assert tab.inner_text(".droppers") == f"“{dropper}” 3 tokens later, in layers 0–2, 4"
    assert tab.get_attribute(".t.dropper", "data-i") == "18"
    assert tab.locator(".threads path.to-dropper").count() == 1
    # whatever was forgotten can be read
    wait_until(tab, "document.getAnimations().length === 0")
    assert tab.evaluate("getComputedStyle(document.querySelector('.t[data-i=\"15\"]')).color") == (
        "rgb(31, 36, 48)"
    )
    tab.click(".droppers button")
    settle(tab)
    told = tab.inner_text("#detail-body")
    assert "It dropped 1 token" in told
    assert "Every layer holds it." in told


def test_memory_against_dense(visit):
    tab, server = visit()
    ask(tab)
    drops, read = drops_of(server), len(server.known["cmpl-1"]) - 1
    rows = tab.eval_on_selector_all(
        "#memory-bars .row", "rows => rows.map(r => [r.dataset.name, +r.dataset.value])"
    )
    dense = BYTES * read * server.layers
    assert rows == [["held", dense - BYTES * len(drops)], ["dense", dense]]
    assert tab.inner_text("#memory-note") == f"{100 * rows[0][1] / dense:.0f} % of a dense cache"
    assert tab.locator("#memory-chart polyline").count() == 2
    # at a time between two reports, from the tokens held
    set_time(tab, 5)
    held = sum(drops.get((layer, i), 99) > 5 for layer in range(6) for i in range(6))
    values = tab.eval_on_selector_all(
        "#memory-bars .row", "rows => rows.map(r => +r.dataset.value)"
    )
    assert values == pytest.approx([BYTES * held, BYTES * 36])
    assert tab.inner_text("#memory-bars .value >> nth=0").startswith("≈")


def test_map_of_layers_and_tokens(visit):
    tab, server = visit()
    ask(tab)
    box = tab.locator("#map").bounding_box()
    T = len(server.known["cmpl-1"])
    tab.mouse.click(box["x"] + box["width"] * 12.5 / T, box["y"] + box["height"] * 2.5 / 6)
    settle(tab)
    assert "token 12," in tab.inner_text("#detail-body")
    assert tab.get_attribute("#layers [aria-checked=true]", "aria-label") == "layer 2"


def test_whole_conversation_fades_in_the_next_turn(visit):
    tab, server = visit()
    ask(tab)
    ask(tab, "And at night?")
    seen = strengths(tab)
    # every token of both turns and of the template is on screen, once
    tokens = server.known["cmpl-2"]
    assert sorted(seen) == list(range(len(tokens)))
    drops = drops_of(server, "cmpl-2")
    last = len(tokens) - 1
    assert seen == {i: strength(share_held(server, drops, i, last)) for i in seen}
    assert [words.strip() for words in texts(tab)][2] == "And at night?"


@pytest.mark.parametrize("words", ["user", "assistant", "  padded  ", "<|im_end|>"])
def test_messages_that_look_like_the_template(visit, words):
    tab, server = visit(answer=lambda body: "Yes.")
    ask(tab, words)
    assert [text.strip() for text in texts(tab)] == [words.strip(), "Yes."]
    assert len(strengths(tab)) == len(server.known["cmpl-1"])
    # after <|im_start|>, user and the end of the line
    assert tab.get_attribute(".message.user .text .t >> nth=0", "data-i") == "3"


def test_raw_is_all_the_model_reads(visit):
    tab, server = visit()
    ask(tab)
    tab.check("#raw")
    whole = "".join(token["text"] for token in server.known["cmpl-1"])
    assert texts(tab) == [whole]
    written = int(tab.get_attribute(".first-written", "data-i"))
    assert "".join(token["text"] for token in server.known["cmpl-1"][written:]) == ANSWER


def test_fading_can_be_switched_off(visit):
    tab, _ = visit()
    ask(tab)
    assert min(strengths(tab).values()) < 0.5
    tab.focus("#talk .t >> nth=0")
    tab.keyboard.press("f")
    assert set(strengths(tab).values()) == {1.0}
    tab.reload()
    tab.wait_for_selector("html[data-ready]")
    assert not tab.is_checked("#fade")


def test_text_of_the_model_is_never_html(visit):
    hostile = "<img src=x onerror=alert(1)><b>bold</b> <script>alert(2)</script> %%STYLE%%"
    tab, _ = visit(answer=lambda body: hostile)
    ask(tab, hostile)
    tab.hover(".message.assistant .t >> nth=1")
    settle(tab)
    assert texts(tab) == [hostile, hostile]
    assert tab.locator("#talk img, #talk b, #talk script, #detail img").count() == 0
    tab.click("#history-button")
    assert tab.inner_text("#saved .title") == hostile
    tab.keyboard.press("Escape")
    press(tab, "Edit", 0)
    assert tab.input_value(".editor textarea") == hostile


def row(request, state, size, tokens=100):
    return {"request": request, "index": 0, "state": state, "tokens": tokens, "read": tokens,
            "kept": 20.0, "bytes": size}  # fmt: skip


def test_rows_of_the_batch_in_their_budget(visit):
    statuses = [
        [row("chatcmpl-aa", "running", 100_000)],
        [row("chatcmpl-aa", "running", 100_000), row("chatcmpl-bb", "waiting", 0)],
        [row("chatcmpl-aa", "running", 100_000), row("chatcmpl-bb", "running", 200_000)],
        [row("chatcmpl-aa", "preempted", 0), row("chatcmpl-bb", "running", 300_000)],
        [row("chatcmpl-aa", "running", 100_000)],
    ]
    tab, server = visit(statuses=statuses[:1], status_pace=0.02)

    def reach(n):
        server.statuses = [statuses[n]]
        want = [[each["request"], each["state"], str(each["bytes"])] for each in statuses[n]]
        shown = """[...document.querySelectorAll("#rows .row")]
            .map(r => [r.dataset.request, r.dataset.state, r.dataset.bytes])"""
        wait_until(tab, f"JSON.stringify({shown}) === JSON.stringify({json.dumps(want)})")

    for n in range(4):
        reach(n)
    widths = tab.eval_on_selector_all("#budget .part", "parts => parts.map(p => p.style.width)")
    assert widths == ["75%"]
    assert "293 KiB of 391 KiB" in tab.inner_text("#budget-note")
    assert "1 preempted" in tab.inner_text("#budget-note")
    assert tab.inner_text("#rows .preempted .value") == "preempted"
    reach(4)
    log = tab.eval_on_selector_all("#batch-log li", "all => all.map(l => l.textContent)")
    words = [line.split(" step")[0] for line in log]
    assert sorted(words[:2]) == ["left bb", "resumed aa"]
    assert words[2:] == ["preempted aa", "admitted bb", "waits bb"]
    assert tab.inner_text("#batch-note") == "1 running, 0 waiting"
    # one that is nearly empty is enlarged: 4,000 of 400,000 / 16
    statuses.append([row("chatcmpl-aa", "running", 4_000)])
    reach(5)
    assert tab.eval_on_selector("#budget .part", "part => part.style.width") == "16%"
    assert "(the bar: 24.4 KiB)" in tab.inner_text("#budget-note")


def test_own_row_is_marked(visit):
    tab, _ = visit(statuses=[[row("cmpl-1", "running", 1000), row("cmpl-9", "running", 1000)]])
    ask(tab)
    wait_until(tab, "document.querySelector('#rows .own')?.dataset.request === 'cmpl-1'")
    assert tab.locator("#rows .own").count() == 1


def test_many_rows(visit):
    tab, _ = visit(statuses=[[*busy_rows(50), *(row(f"x-{n}", "running", 10) for n in range(30))]])
    wait_until(tab, "document.querySelectorAll('#rows .row').length === 10")
    assert "rows more" in tab.inner_text("#rows")
