"""Asking on the page: send, stop, regenerate, edit, go on, compare; what the server refuses."""

import json

import pytest
from page_server import ANSWER, numbered
from visitor import answered, ask, press, strengths, texts, wait_for_tokens

from browser import settle, wait_until
from kvprune.explain.page import render_page
from traces import random_trace


def contents(body):
    return [(message["role"], message["content"]) for message in body["messages"]]


def test_answer_streams_and_is_told_about(visit):
    tab, server = visit(hold_at=6)
    ask(tab, wait=False)
    wait_for_tokens(tab, 6)
    assert texts(tab)[-1] == "".join(token["text"] for token in numbered(ANSWER)[:6])
    assert tab.is_visible("#stop")
    tab.wait_for_timeout(150)
    server.release.set()
    answered(tab)
    assert texts(tab) == ["Why is the sky blue?", ANSWER]
    path, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert contents(body) == [("user", "Why is the sky blue?")]
    assert body["model"] == "made-up-80"
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert body["kvprune"] == {"report": True}
    meta = tab.inner_text(".meta")
    assert meta.startswith(f"{len(numbered(ANSWER))} tokens")
    assert "tokens/s" in meta
    total = len(server.known["cmpl-1"])
    assert tab.inner_text("#context-note") == f"{total} of 2,048 tokens"
    assert tab.get_attribute("#gauge", "aria-valuenow") == str(total)


def test_settings_are_sent_and_kept(visit):
    tab, server = visit()
    tab.click("#settings-button")
    tab.fill("#system", "Be brief.")
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 9,
              "seed": 7}  # fmt: skip
    own = {"threshold": -0.25, "protect_recent": 32}
    for name, value in (values | own).items():
        tab.fill(f"#settings [name={name}]", str(value))
    tab.keyboard.press("Escape")
    tab.reload()
    tab.wait_for_selector("html[data-ready]")
    ask(tab)
    body = server.requests[0][1]
    assert {name: body[name] for name in values} == values
    assert body["kvprune"] == {"report": True, **own}
    assert contents(body)[0] == ("system", "Be brief.")
    assert "ended by the limit" in tab.inner_text(".meta")
    assert "Be brief." in texts(tab)[0]


def test_server_that_reports_nothing(visit):
    tab, _ = visit(report=False)
    ask(tab)
    assert texts(tab) == ["Why is the sky blue?", ANSWER]
    assert tab.locator("#talk .t").count() == 0
    assert not tab.is_visible("#bar")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_stop(visit, way):
    tab, server = visit(hold_at=4)
    ask(tab, wait=False)
    wait_for_tokens(tab, 4)
    tab.click("#stop") if way == "button" else tab.keyboard.press("Escape")
    answered(tab)
    assert texts(tab)[-1] == "".join(token["text"] for token in numbered(ANSWER)[:4])
    assert "stopped" in tab.inner_text(".meta")
    server.hold_at = None
    server.release.set()
    for _ in range(100):
        if server.cancelled:
            break
        tab.wait_for_timeout(20)
    assert server.cancelled == ["cmpl-1"]
    ask(tab, "And then?")
    assert texts(tab)[-1] == ANSWER


def test_stop_before_the_first_token_leaves_the_question(visit):
    tab, server = visit(hold_at=0)
    ask(tab, wait=False)
    tab.click("#stop")
    answered(tab)
    assert texts(tab) == ["Why is the sky blue?"]
    server.release.set()
    press(tab, "Answer")
    answered(tab)
    assert texts(tab) == ["Why is the sky blue?", ANSWER]


def test_regenerate_asks_the_same_again(visit):
    tab, server = visit(answer=lambda body: f"Answer {len(server.requests)}.")
    ask(tab)
    press(tab, "Regenerate")
    answered(tab)
    assert texts(tab) == ["Why is the sky blue?", "Answer 2."]
    assert contents(server.requests[0][1]) == contents(server.requests[1][1])


def test_editing_a_question_goes_on_from_there(visit):
    tab, server = visit(answer=lambda body: f"Answer {len(server.requests)}.")
    ask(tab, "One?")
    ask(tab, "Two?")
    press(tab, "Edit", 0)
    tab.fill(".editor textarea", "Another?")
    tab.keyboard.press("Escape")
    assert texts(tab) == ["One?", "Answer 1.", "Two?", "Answer 2."]
    press(tab, "Edit", 0)
    tab.fill(".editor textarea", "Another?")
    tab.keyboard.press("Enter")
    answered(tab)
    assert texts(tab) == ["Another?", "Answer 3."]
    assert contents(server.requests[2][1]) == [("user", "Another?")]


def test_editing_an_answer_asks_nothing(visit):
    tab, server = visit()
    ask(tab)
    press(tab, "Edit")
    tab.fill(".editor textarea", "It is not.")
    tab.click(".editor .primary")
    assert texts(tab)[-1] == "It is not."
    ask(tab, "Why?")
    assert [words for _, words in contents(server.requests[1][1])][1] == "It is not."
    assert len(server.requests) == 2


def test_arrow_up_edits_the_last_question(visit):
    tab, _ = visit()
    ask(tab)
    tab.focus("#prompt")
    tab.keyboard.press("ArrowUp")
    assert tab.input_value(".editor textarea") == "Why is the sky blue?"


@pytest.mark.parametrize("ends", [False, True])
def test_continue_sends_the_very_tokens(visit, ends):
    parts = ["One two three", " four five.", "Six."]
    tab, server = visit(answer=lambda body: parts[len(server.requests) - 1], ends=ends)
    ask(tab)
    server.ends = False
    press(tab, "Continue")
    answered(tab)
    path, body = server.requests[1]
    assert path == "/v1/completions"
    assert body["prompt"] == [token["id"] for token in server.known["cmpl-1"]]
    assert texts(tab) == ["Why is the sky blue?", "One two three four five."]
    ask(tab, "And?")
    assert [words for _, words in contents(server.requests[2][1])][1] == "One two three four five."


def test_completion_goes_on_from_a_text(visit):
    parts = [" there was", " a sea", " again"]
    tab, server = visit(answer=lambda body: parts[len(server.requests) - 1])
    tab.click("text=Completion")
    ask(tab, "Once")
    assert texts(tab) == ["Once there was"]
    assert server.requests[0][0] == "/v1/completions"
    assert server.requests[0][1]["prompt"] == "Once"
    ask(tab, " and")
    assert server.requests[1][1]["prompt"] == "Once there was and"
    assert texts(tab) == ["Once there was and a sea"]
    press(tab, "Edit")
    assert tab.input_value(".editor textarea") == "Once there was and a sea"
    tab.fill(".editor textarea", "Twice")
    tab.click(".editor .primary")
    answered(tab)
    assert server.requests[2][1]["prompt"] == "Twice"
    assert texts(tab) == ["Twice again"]


def test_compare_asks_the_same_with_nothing_dropped(visit):
    def answer(body):
        dense = body["kvprune"].get("threshold") == -1e9
        return "The sky is blue. It is wide." if dense else "The sky is red. It is."

    tab, server = visit(answer=answer, rule=lambda layer, token, text, dropper, mark: True)
    tab.check("#compare")
    ask(tab)
    bodies = sorted((body for _, body in server.requests), key=lambda b: len(b["kvprune"]))
    pruned, dense = bodies
    assert dense.pop("kvprune") == {"report": True, "threshold": -1e9}
    assert pruned.pop("kvprune") == {"report": True}
    assert pruned == dense
    assert isinstance(pruned["seed"], int)
    titles = tab.eval_on_selector_all(".side h3", "all => all.map(h => h.firstChild.data.trim())")
    assert titles == ["Pruned", "Nothing dropped"]
    assert texts(tab)[1:] == ["The sky is red. It is.", "The sky is blue. It is wide."]
    assert tab.inner_text(".meta").startswith("The same for the first 3 tokens")
    assert tab.locator(".differs").all_inner_texts() == ["red", "blue"]
    assert set(strengths(tab, side=1).values()) == {1.0}
    assert min(strengths(tab).values()) < 0.5
    # the pruned answer is the one that the conversation goes on from, and fades on
    tab.uncheck("#compare")
    ask(tab, "Why?")
    assert len(strengths(tab)) == len(server.known["cmpl-3"])
    notes = tab.locator(".side-note").all_inner_texts()
    assert [note.split(" · ")[0] for note in notes] == ["8 tokens", "9 tokens"]
    assert contents(server.requests[2][1])[1] == ("assistant", "The sky is red. It is.")


def test_refusal_is_shown_and_can_be_tried_again(visit):
    tab, server = visit(expected="400", refuse=(400, "max_tokens 9000 exceeds 2048 positions"))
    ask(tab)
    assert "max_tokens 9000 exceeds" in tab.inner_text(".failure[role=alert]")
    tab.click(".failure button")
    answered(tab)
    assert texts(tab)[-1] == ANSWER
    assert tab.locator(".failure").count() == 0
    assert contents(server.requests[1][1]) == [("user", "Why is the sky blue?")]


def test_error_within_a_stream_is_shown(visit):
    tab, _ = visit(break_at=3)
    ask(tab)
    assert "The engine died." in tab.inner_text(".failure")
    assert texts(tab)[-1] == "".join(token["text"] for token in numbered(ANSWER)[:3])


def test_server_that_went_away(visit):
    tab, server = visit(expected="ERR_")
    server.shutdown()
    server.server_close()
    ask(tab)
    assert "cannot be reached" in tab.inner_text(".failure")


def test_key_is_a_header_of_this_tab_only(visit):
    tab, _ = visit(expected="401", key="secret")
    assert "API key" in tab.inner_text("#trouble")
    ask(tab)
    tab.click("text=Enter a key")
    tab.keyboard.type("secret")
    tab.keyboard.press("Escape")
    wait_until(tab, "document.getElementById('model').textContent === 'made-up-80'")
    tab.click(".failure >> text=Try again")
    answered(tab)
    assert texts(tab)[-1] == ANSWER
    assert tab.evaluate("JSON.parse(sessionStorage['kvprune.key'])") == "secret"
    assert "secret" not in tab.evaluate("JSON.stringify(localStorage)")
    assert "secret" not in tab.url


def test_conversations_stay_in_the_browser(visit, tmp_path):
    tab, _ = visit()
    ask(tab)
    shades = strengths(tab)
    tab.click("#history-button")
    with tab.expect_download() as download:
        tab.click("#export")
    file = tmp_path / "talk.json"
    download.value.save_as(file)
    saved = json.loads(file.read_text())
    assert [message["text"] for message in saved["messages"]] == ["Why is the sky blue?", ANSWER]
    tab.reload()
    tab.wait_for_selector("html[data-ready]")
    assert tab.locator(".message").count() == 0
    tab.click("#history-button")
    tab.click("#saved .open")
    assert texts(tab) == ["Why is the sky blue?", ANSWER]
    # a file has what was dropped too
    tab.click("#new")
    tab.set_input_files("#file", file)
    tab.wait_for_selector("#bar:visible")
    assert strengths(tab) == shades
    tab.click("#history-button")
    tab.click("#saved .delete")
    assert tab.inner_text("#saved") == "Nothing yet."


def test_other_files_are_refused(visit, tmp_path):
    tab, _ = visit()
    file = tmp_path / "other.json"
    file.write_text('{"messages": []}')
    tab.set_input_files("#file", file)
    tab.wait_for_selector("#trouble:visible")
    assert "other.json" in tab.inner_text("#trouble")


@pytest.mark.parametrize("key", [None, "secret"])
def test_explain_page_of_a_conversation_opens(visit, key):
    page = render_page(random_trace(3, 40), "A trace")
    tab, server = visit(expected="the server responded", key=key, trace_page={"cmpl-1": page}.get)
    if key:
        tab.evaluate("sessionStorage['kvprune.key'] = '\"secret\"'")
        tab.reload()
        tab.wait_for_selector("html[data-ready]")
    ask(tab)
    with tab.expect_popup() as popup:
        press(tab, "Explain")
    # its own script runs
    popup.value.wait_for_selector("html[data-ready]")
    assert popup.value.inner_text("h1") == "A trace"
    popup.value.close()
    tab.bring_to_front()
    server.trace_page = {}.get
    with tab.expect_popup():
        press(tab, "Explain")
    tab.wait_for_selector("#trouble:visible")
    assert "no longer has the trace" in tab.inner_text("#trouble")


def test_opening_another_conversation_stops_the_answer(visit):
    tab, server = visit(hold_at=3)
    ask(tab, wait=False)
    wait_for_tokens(tab, 3)
    tab.click("#new")
    answered(tab)
    assert tab.locator(".message").count() == 0
    server.release.set()
    settle(tab)
    assert tab.locator(".message").count() == 0
    assert tab.is_visible(".welcome")
