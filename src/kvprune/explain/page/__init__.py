"""The page to explore a trace: one file, no network access, all text escaped."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.explain.page.data import page_data as page_data
from kvprune.explain.page.factors import page_scores
from kvprune.explain.page.notebook import notebook_summary as notebook_summary
from kvprune.utils.files import write_atomically
from kvprune.utils.page import fill_template, policy_hash

if TYPE_CHECKING:
    from kvprune.explain.trace import Trace

FOLDER = Path(__file__).parent
# in the order of concatenation: each may use the ones before it
SCRIPTS = (
    "unpack.js", "record.js", "statistics.js", "view.js", "text.js", "detail.js", "why.js",
    "cost.js", "compare.js", "masks.js", "charts.js", "search.js", "link.js", "main.js",
)  # fmt: skip
# characters of a page of up to LONG tokens, over all layers: what is left goes into the curves
BUDGET, LONG = 1_450_000, 30 * 2000


def write_page(
    trace: Trace, path: str | Path, title: str = "", against: Trace | None = None
) -> Path:
    """Write the page of a trace, or of two of the same text side by side, as one file."""
    file = Path(path)
    page = render_page(trace, title, against)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, page.encode())
    return file


def render_page(trace: Trace, title: str = "", against: Trace | None = None) -> str:
    """The page as text.

    The traces are JSON in a block that browsers do not execute, with `<`, `>` and `&` escaped, and
    the scripts insert it only as text. The content security policy allows just our one script, by
    its hash, and no request: even a token that escaped its block could not run.
    """
    style, script = page_style(), page_script()
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    data = page_data(trace, against)
    room = budget(trace) - len(style) - len(script) - len(template) - len(_embedded_json(data))
    traces = [trace] if against is None else [trace, against]
    for each, record in zip(traces, data["records"], strict=True):
        if each.votes is not None:
            record["scores"] = page_scores(each.votes, room // len(traces))
    values = {
        "TITLE": html.escape(title or "What the model forgets"),
        "POLICY": f"default-src 'none'; style-src '{policy_hash(style)}'; "
        f"script-src '{policy_hash(script)}'",
        "STYLE": style,
        "DATA": _embedded_json(data),
        "SCRIPT": script,
    }
    return fill_template(template, values)


def page_style() -> str:
    return (FOLDER / "page.css").read_text(encoding="utf-8")


def page_script() -> str:
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    # await: unpacking is asynchronous
    return f'"use strict";\n(async () => {{\n{script}}})();\n'


def budget(trace: Trace) -> int:
    """Characters of its page; a longer text gets more, so that its curves are no worse."""
    return BUDGET * max(LONG, trace.drop_step.size) // LONG


def _embedded_json(values: dict[str, Any]) -> str:
    """JSON that is safe inside a script block: ASCII, without characters special to HTML."""
    text = json.dumps(values, default=_to_plain, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} cannot be written as JSON")
