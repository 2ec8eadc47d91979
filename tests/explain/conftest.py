"""A browser for the tests of the page."""

import pytest


@pytest.fixture
def visit(browser, tmp_path):
    """Open the page of a trace; any error, console message or other request fails the test."""
    problems, contexts = [], []

    def open_page(trace, title="", against=None, hash="", before="", count_time=False, **options):
        file = trace.to_html(tmp_path / "page.html", title, against)
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        tab = context.new_page()
        if before:
            tab.add_init_script(before)
        if count_time:
            tab.session = context.new_cdp_session(tab)
            tab.session.send("Performance.enable", {"timeDomain": "threadTicks"})
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("request", lambda request: problems.append(request.url)
               if request.url.split("#")[0] != file.as_uri() else None)  # fmt: skip
        tab.goto(file.as_uri() + hash)
        tab.wait_for_selector("html[data-ready], #trouble:not([hidden])")
        return tab

    open_page.problems = problems
    yield open_page
    for context in contexts:
        context.close()
    assert problems == []
