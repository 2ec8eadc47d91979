"""A browser that opens the page of a small server."""

from contextlib import ExitStack

import pytest
from page_server import serving


@pytest.fixture
def visit(browser):
    """Open the page of a server with these values; any error, message or other address fails.

    `expected` is a message of the console that belongs to the test.
    """
    problems = []
    with ExitStack() as stack:

        def open_page(expected=None, options=None, **values):
            server = stack.enter_context(serving(**values))
            size = {"viewport": {"width": 1280, "height": 900}}
            context = stack.enter_context(browser.new_context(**{**size, **(options or {})}))
            tab = context.new_page()
            tab.set_default_timeout(10_000)
            tab.on("pageerror", lambda error: problems.append(str(error)))
            tab.on("console", lambda message: problems.append(message.text)
                   if expected is None or expected not in message.text else None)  # fmt: skip
            own = (server.url, "data:", "blob:")
            tab.on("request", lambda request: problems.append(request.url)
                   if not request.url.startswith(own) else None)  # fmt: skip
            tab.goto(server.url)
            tab.wait_for_selector("html[data-ready]")
            return tab, server

        yield open_page
    assert problems == []
