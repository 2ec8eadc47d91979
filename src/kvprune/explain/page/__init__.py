"""The page to explore a trace: one file, no network access, all text escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.explain.token_text import KINDS, token_kind
from kvprune.ops.timeline import NEVER
from kvprune.utils.files import write_atomically

if TYPE_CHECKING:
    from kvprune.explain.trace import Trace

FOLDER = Path(__file__).parent
# in the order of concatenation: each may use the ones before it
SCRIPTS = ("record.js", "view.js", "text.js", "masks.js", "charts.js", "main.js")


def write_page(trace: Trace, path: str | Path, title: str = "") -> Path:
    """Write the page of a trace as one self-contained file."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, render_page(trace, title).encode())
    return file


def render_page(trace: Trace, title: str = "") -> str:
    """The page as text.

    The trace is JSON in a block that browsers do not execute, with `<`, `>` and `&` escaped, and
    the scripts insert it only as text. The content security policy allows just our one script, by
    its hash, and no request: even a token that escaped its block could not run.
    """
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    values = {
        "TITLE": html.escape(title or "What the model forgets"),
        "POLICY": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        "STYLE": style,
        "DATA": _embedded_json(page_data(trace)),
        "SCRIPT": script,
    }
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    # every second part is a name; splitting first leaves %% in a token alone
    parts = template.split("%%")
    return "".join(values[part] if i % 2 else part for i, part in enumerate(parts))


def page_data(trace: Trace) -> dict[str, Any]:
    """The trace, with the kind and part of speech of each token."""
    from kvprune.explain import parts_of_speech

    values = trace.to_dict()
    del values["votes"]  # as large as the rest of the page
    values["kinds"] = list(KINDS)
    values["kind"] = [KINDS.index(token_kind(token)) for token in trace.tokens]
    available = parts_of_speech.available()
    tags = parts_of_speech.tag_tokens(trace.tokens) if available else None
    values["speeches"] = list(parts_of_speech.PARTS) if tags else []
    values["speech"] = [parts_of_speech.PARTS.index(tag) for tag in tags] if tags else []
    return values


def notebook_summary(trace: Trace, max_tokens: int = 1500) -> str:
    """The text for notebooks: the more layers have dropped a token, the fainter it is."""
    alive = (trace.drop_step == NEVER).mean(0)
    L, T = trace.drop_step.shape
    spans = []
    for i, token in enumerate(trace.tokens[:max_tokens]):
        dropped = round(L * (1 - float(alive[i])))
        note = f"token {i}: dropped in {dropped} of {L} layers"
        opacity = 0.25 + 0.75 * float(alive[i])
        spans.append(
            f'<span style="opacity:{opacity:.2f}" title="{note}">{html.escape(token)}</span>'
        )
    more = f" … and {T - max_tokens} more tokens" if max_tokens < T else ""
    held = float(trace.kept[:, -1].mean())
    return (
        f'<div dir="auto" style="white-space:pre-wrap;line-height:1.7">{"".join(spans)}{more}</div>'
        f'<p style="opacity:.7">{T} tokens × {L} layers; at the end a layer holds '
        f"{held:.0f} tokens ({held / T:.0%}). <code>trace.to_html(path)</code> for the page.</p>"
    )


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


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
