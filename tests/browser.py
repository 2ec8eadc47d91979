"""What a visitor does on the explain page, for tests in a real browser."""

import os
import shutil
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


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
