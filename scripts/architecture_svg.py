"""Draw the packages of kvprune as the import contract orders them: docs/figures/architecture.svg.

    python scripts/architecture_svg.py

The layers are read from pyproject.toml and the descriptions from the packages' docstrings, so that
the picture shows what lint-imports checks. tests/contracts compares the file with what this draws.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs/figures/architecture.svg"
WIDTH, ROW, GAP, MARGIN = 860, 46, 10, 16
STYLE = """
  :root { --ink: #1e293b; --muted: #64748b; --box: #f1f5f9; --edge: #cbd5e1; --paper: #ffffff }
  @media (prefers-color-scheme: dark) { :root { --ink: #e2e8f0; --muted: #94a3b8; --box: #1e293b;
    --edge: #475569; --paper: #0f172a } }
  .paper { fill: var(--paper) } .box { fill: var(--box); stroke: var(--edge) }
  .name { fill: var(--ink); font: 600 14px ui-monospace, Menlo, Consolas, monospace }
  .says { fill: var(--muted); font: 12.5px system-ui, sans-serif }
  .arrow { stroke: var(--muted); fill: none; stroke-width: 1.4 }
"""


def main() -> None:
    OUT.write_text(draw(layers()), encoding="utf-8")
    print(OUT.relative_to(ROOT))


def layers() -> list[list[str]]:
    """Top to bottom; packages of one layer do not import each other."""
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    contracts = settings["importlinter"]["contracts"]
    order = next(c["layers"] for c in contracts if c["type"] == "layers")
    return [[name.strip() for name in layer.split("|")] for layer in order]


def describe(name: str) -> str:
    """The first line of the docstring, without what follows a colon if it is long."""
    place = ROOT / "src/kvprune" / name
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")[0]
    return text.rstrip(".")


def draw(rows: list[list[str]]) -> str:
    height = len(rows) * (ROW + GAP) - GAP + 2 * MARGIN
    parts = []
    for number, names in enumerate(rows):
        y = MARGIN + number * (ROW + GAP)
        width = (WIDTH - 2 * MARGIN - 40 - GAP * (len(names) - 1)) / len(names)
        for place, name in enumerate(names):
            parts.append(_box(name, MARGIN + 40 + place * (width + GAP), y, width))
    top, bottom = MARGIN + 4, height - MARGIN
    parts.append(
        f'<path class="arrow" d="M{MARGIN + 14} {top} V{bottom} m-5 -8 l5 8 l5 -8"/>'
        f'<text class="says" transform="translate({MARGIN + 6} {height / 2}) rotate(-90)" '
        f'text-anchor="middle">imports only from below</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'role="img" aria-label="The packages of kvprune in layers: '
        f'{escape("; ".join(", ".join(names) for names in rows))}"><style>{STYLE}</style>'
        f'<rect class="paper" width="100%" height="100%" rx="8"/>{"".join(parts)}</svg>\n'
    )


def _box(name: str, x: float, y: float, width: float) -> str:
    says = describe(name)
    # some 6.1 pixels per letter; the rest of a long line is in the package itself
    room = int((width - 24) / 6.1)
    if len(says) > room:
        says = says[: room - 1].rsplit(" ", 1)[0].rstrip(",:;") + " …"
    return (
        f'<rect class="box" x="{x:.0f}" y="{y}" width="{width:.0f}" height="{ROW}" rx="6"/>'
        f'<text class="name" x="{x + 12:.0f}" y="{y + 19}">{escape(name)}</text>'
        f'<text class="says" x="{x + 12:.0f}" y="{y + 36}">{escape(says)}</text>'
    )


if __name__ == "__main__":
    main()
