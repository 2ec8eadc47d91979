"""A real browser for tests, and what a visitor does in it."""

import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@contextmanager
def chromium():
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        # the sandbox does not work for root in a container
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def screenshot(tab, name):
    """Saved to the folder KVPRUNE_SHOTS, if set, for people to look at."""
    if folder := os.environ.get("KVPRUNE_SHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tab.screenshot(path=Path(folder) / f"{name}.png")


def settle(tab):
    """Wait for two frames: a change is drawn in the next one."""
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def tokens_with(tab, name, pane="#text"):
    settle(tab)
    script = (
        "([pane, name]) =>"
        " [...document.querySelectorAll(`${pane} .t.${name}`)].map(t => +t.dataset.i)"
    )
    return tab.evaluate(script, [pane, name])


def token(tab, i, pane="#text"):
    return tab.locator(f"{pane} .t").nth(i)


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
    """By its index in the trace; None: all layers, which come first."""
    tab.locator("#layers button").nth(0 if layer is None else layer + 1).click()
    settle(tab)


def wait_until(tab, script):
    """Until it is true; wait_for_function would need eval, which the page's policy forbids."""
    for _ in range(200):
        if tab.evaluate(script):
            return
        tab.wait_for_timeout(50)
    raise AssertionError(f"never true: {script}")


def rgb(colour):
    """Red, green, blue in [0, 1] and opacity of a computed colour."""
    numbers = [float(n) for n in re.findall(r"-?[\d.]+(?:e-?\d+)?", colour)]
    scale = 1 if colour.startswith("color(") else 255
    return np.array(numbers[:3]) / scale, numbers[3] if len(numbers) > 3 else 1.0


def luminance(colour):
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(text, background, paper):
    """The ratio of the Web Content Accessibility Guidelines, of text on what lies over paper."""
    below, opacity = rgb(background)
    below = opacity * below + (1 - opacity) * rgb(paper)[0]
    low, high = sorted([luminance(rgb(text)[0]), luminance(below)])
    return (high + 0.05) / (low + 0.05)
