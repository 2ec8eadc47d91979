"""The page of the server: one file, no request but to the server itself, all text escaped."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from kvprune.explain.page import page_script, page_style
from kvprune.utils.page import fill_template, policy_hash

FOLDER = Path(__file__).parent
# in the order of concatenation: each may use the ones before it
SCRIPTS = (
    "base.js", "store.js", "stream.js", "record.js", "view.js", "talk.js", "detail.js",
    "memory.js", "batch.js", "send.js", "history.js", "main.js",
)  # fmt: skip


@cache
def chat_page() -> str:
    """The page as text.

    Its policy allows our own script and style, by their hashes, and requests to the server alone.
    The explain page of a conversation opens as a blob, which is under the policy of the page that
    made it: so its script and style are allowed too.
    """
    style, script = _packed_style(), _packed_script()
    values = {"POLICY": _policy(style, script), "STYLE": style, "SCRIPT": script}
    return fill_template("\n".join(_lines("page.html")), values)


def _policy(style: str, script: str) -> str:
    styles, scripts = (
        " ".join(f"'{policy_hash(source)}'" for source in sources)
        for sources in ((style, page_style()), (script, page_script()))
    )
    return (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; style-src {styles}; script-src {scripts}"
    )


def _lines(name: str) -> list[str]:
    """A part without indentation and without the lines that are comments."""
    lines = map(str.strip, (FOLDER / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and not line.startswith("//")]


def _packed_script() -> str:
    """The scripts as one, with fewer blanks: none next to punctuation that is outside of strings.

    Lines with other quotes or with a slash stay as they are: they may hold templates or patterns.
    """

    def packed(line: str) -> str:
        if re.search("['`/]", line):
            return line
        parts = re.split('("[^"]*")', line)
        parts[::2] = [re.sub(r" ?([][{}();,=<>+*?:&|!-]) ?", r"\1", part) for part in parts[::2]]
        return "".join(parts)

    lines = [packed(line) for name in SCRIPTS for line in _lines(name)]
    return "\n".join(['"use strict";', "(() => {", *lines, "})();", ""])


def _packed_style() -> str:
    style = re.sub(r"/\*.*?\*/", "", "\n".join(_lines("page.css")), flags=re.DOTALL)
    style = re.sub(r"\s*([{};,])\s*", r"\1", style)
    return re.sub(r"([{;][\w-]+): ", r"\1:", style)
