"""What a visitor does on the page of the server, and sees."""

import re

from page_server import Row

from browser import settle, wait_until

FLOOR = 0.26  # how strong a token is that no layer holds: page.css


def ask(tab, words="Why is the sky blue?", wait=True):
    tab.fill("#prompt", words)
    tab.keyboard.press("Enter")
    if wait:
        answered(tab)


def answered(tab):
    tab.wait_for_selector("#send:visible")
    settle(tab)


def wait_for_tokens(tab, number):
    wait_until(tab, f"document.querySelectorAll('.message.assistant .t').length >= {number}")


def press(tab, name, n=-1):
    """A button among the tools of a message."""
    tab.locator(".tools").nth(n).get_by_role("button", name=name, exact=True).click()


def texts(tab):
    """Each message without its head."""
    settle(tab)
    return tab.evaluate("[...document.querySelectorAll('.message .text')].map(t => t.textContent)")


def strengths(tab, side=0):
    """How strong the colour of each token is while nobody points at it."""
    tab.mouse.move(1, 1)
    tab.evaluate("document.activeElement.blur()")
    settle(tab)
    wait_until(tab, "document.getAnimations().length === 0")
    colours = tab.evaluate(
        "side => [...document.querySelectorAll(`.t[data-side='${side}']`)]"
        ".map(t => [Number(t.dataset.i), getComputedStyle(t).color])", side,
    )  # fmt: skip
    return {i: alpha(colour) for i, colour in colours}


def alpha(colour):
    numbers = re.findall(r"[\d.]+(?:e-?\d+)?", colour)
    return float(numbers[3]) if len(numbers) > 3 else 1.0


def drops_of(server, id="cmpl-1", prompt=None):
    """(layer, token) → dropper, by the rule of the server, of a completion of `id`."""
    tokens = server.known[id]
    row, found = Row(None, server.rule, server.layers), {}
    # the last token of an answer is never read
    report = row.step(tokens, len(tokens) - 1)
    for layer, pairs in report["dropped"]:
        found |= {(layer, token): dropper for token, dropper in pairs}
    return found


def share_held(server, drops, token, time):
    held = [drops.get((layer, token), time + 1) > time for layer in range(server.layers)]
    return sum(held) / server.layers
