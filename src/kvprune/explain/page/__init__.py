"""The page to explore a trace: one file, no network, all text escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.explain.pieces import KINDS, kind
from kvprune.ops.timeline import NEVER
from kvprune.utils.files import write_atomically

if TYPE_CHECKING:
    from kvprune.explain.trace import Trace

FOLDER = Path(__file__).parent
# in the order in which they are joined: each may use what stands before it
SCRIPTS = ("record.js", "view.js", "text.js", "masks.js", "charts.js", "main.js")


def write(trace: Trace, path: str | Path, title: str = "") -> Path:
    """Write the page of a trace; it opens from the disk and asks for nothing else."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, page(trace, title).encode())
    return file


def page(trace: Trace, title: str = "") -> str:
    """The page as text.

    The trace is JSON in a block that no browser runs, with `<`, `>` and `&` escaped; the scripts
    put text into the page as text only. The policy in the head names the hash of our one script,
    so that a token which did get out would still not run, and forbids every request.
    """
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = f'"use strict";\n(() => {{\n{script}}})();\n'
    filled = {
        "TITLE": html.escape(title or "What the model forgets"),
        "POLICY": f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        "STYLE": style,
        "DATA": _embedded(data(trace)),
        "SCRIPT": script,
    }
    made = (FOLDER / "page.html").read_text(encoding="utf-8")
    parts = made.split("%%")
    # every second part is a name; a token that looks like one is never looked at
    return "".join(filled[part] if i % 2 else part for i, part in enumerate(parts))


def data(trace: Trace) -> dict[str, Any]:
    """What the page is given: the trace, and the kind and part of speech of each token."""
    from kvprune.explain import speech

    values = trace.to_dict()
    values["kinds"] = list(KINDS)
    values["kind"] = [KINDS.index(kind(token)) for token in trace.tokens]
    tags = speech.tags(trace.tokens) if speech.available() else None
    values["speeches"] = list(speech.PARTS) if tags else []
    values["speech"] = [speech.PARTS.index(tag) for tag in tags] if tags else []
    return values


def summary(trace: Trace, longest: int = 1500) -> str:
    """The text alone, for notebooks: the more layers have dropped a token, the fainter it is."""
    alive = (trace.drop_step == NEVER).mean(0)
    L, T = trace.drop_step.shape
    spans = []
    for i, token in enumerate(trace.tokens[:longest]):
        gone = round(L * (1 - float(alive[i])))
        note = f"token {i}: dropped in {gone} of {L} layers"
        faint = 0.25 + 0.75 * float(alive[i])
        spans.append(
            f'<span style="opacity:{faint:.2f}" title="{note}">{html.escape(token)}</span>'
        )
    more = f" … and {T - longest} more tokens" if longest < T else ""
    held = float(trace.kept[:, -1].mean())
    return (
        f'<div dir="auto" style="white-space:pre-wrap;line-height:1.7">{"".join(spans)}{more}</div>'
        f'<p style="opacity:.7">{T} tokens × {L} layers; at the end a layer holds '
        f"{held:.0f} tokens ({held / T:.0%}). <code>trace.to_html(path)</code> for the page.</p>"
    )


def _embedded(values: dict[str, Any]) -> str:
    """JSON that is safe inside a script block: ASCII, and nothing that HTML could read."""
    text = json.dumps(values, default=_plain, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is no JSON")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
