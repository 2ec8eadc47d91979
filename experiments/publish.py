"""Where results go: rows in docs/results, figures in docs/figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.utils import plot
from kvprune.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOCS = Path(__file__).parent.parent / "docs"


def publish(
    name: str, about: dict[str, Any], rows: list[dict[str, Any]], docs: Path = DOCS
) -> None:
    """Write the rows as docs/results/NAME.json, one per line."""
    file = docs / "results" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n  ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    head = json.dumps(about, ensure_ascii=False)
    write_atomically(file, f'{{\n "about": {head},\n "rows": [\n  {lines}\n ]\n}}\n'.encode())
    print(f"wrote {file.relative_to(docs.parent)}")


def save_figure(figure: Figure, name: str, docs: Path = DOCS) -> None:
    """Write docs/figures/NAME.png and .svg."""
    for file in plot.save(figure, docs / "figures" / name):
        print(f"wrote {file.relative_to(docs.parent)}")
