"""Self-contained HTML pages: no scripts, no fonts or pictures from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; --ink: #1e293b; --muted: #64748b; --grid: #e2e8f0;
  --paper: #ffffff; --band: #f8fafc; --accent: #2f7ed8 }
@media (prefers-color-scheme: dark) { :root { --ink: #e2e8f0; --muted: #94a3b8; --grid: #334155;
  --paper: #0f172a; --band: #17213a; --accent: #6aa9ee } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 15px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif }
h1 { font-size: 1.55rem; margin: 0 0 1.4rem; letter-spacing: -0.01em }
h2 { font-size: 1.08rem; margin: 2.6rem 0 0.7rem }
.note { color: var(--muted); margin: -0.9rem 0 1.4rem; max-width: 60rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { padding: 0.42rem 0.8rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid) }
th { color: var(--muted); font-weight: 600; font-size: 0.82rem; border-bottom-width: 2px }
.left { text-align: left }
tbody tr:hover { background: var(--band) }
figure { margin: 2rem 0 }
figure svg { width: 100%; min-width: 36rem; max-width: 66rem; height: auto; display: block }
svg text { font-family: system-ui, -apple-system, "Segoe UI", sans-serif !important }
details { border-bottom: 1px solid var(--grid); padding: 0.5rem 0 }
summary { cursor: pointer; color: var(--accent) }
pre { background: var(--band); padding: 0.8rem 1rem; border-radius: 6px; overflow-x: auto;
  font-size: 0.82rem; line-height: 1.45 }
footer { margin-top: 3rem; color: var(--muted); font-size: 0.85rem }
"""


def page(title: str, parts: list[str]) -> str:
    """A complete document; the parts are HTML, the title is text."""
    from kvprune.version import __version__

    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        + "\n".join(parts)
        + f"\n<footer>kvprune {escape(__version__)}</footer>\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def note(text: str) -> str:
    return f"<p class=note>{escape(text)}</p>"


def table(columns: list[str], rows: list[list[str]], left: int = 1) -> str:
    """The first `left` columns aligned left, the others right; all cells are plain text."""

    def cells(tag: str, row: list[str]) -> str:
        return "".join(
            f"<{tag}{' class=left' if i < left else ''}>{escape(str(cell))}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return (
        f'<div class="wide"><table>\n<thead><tr>{cells("th", columns)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def figure(svg: str, label: str) -> str:
    """An SVG drawing as it is; its text must be escaped already."""
    return f'<figure class="wide" role="img" aria-label="{escape(label)}">{svg}</figure>'


def details(title: str, about: dict[str, Any]) -> str:
    """A section to unfold: how a number was measured."""
    text = json.dumps(about, indent=1, ensure_ascii=False)
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def fill_template(template: str, values: dict[str, str]) -> str:
    """The template with each %%NAME%% replaced by its value."""
    # every second part is a name; splitting first leaves %% in a value alone
    parts = template.split("%%")
    return "".join(values[part] if i % 2 else part for i, part in enumerate(parts))


def policy_hash(source: str) -> str:
    """By which a content security policy allows one inline script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
