"""What the documentation site adds to docs/: pages of the root folder, and links that hold there.

README.md is the home page; CONTRIBUTING.md and CHANGELOG.md are pages of their own. A link to a
file outside of docs/ works on GitHub and has no target on the site: its text stays, as text.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")
OUTSIDE = re.compile(r"(\.\./)+(?!cli/|api/)|(src|tests|examples|experiments|benchmarks)/|CITATION")


def on_files(files: Files, config: Any) -> Files:
    for source, target in PAGES.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    return LINK.sub(without_outside_link, markdown)


def without_outside_link(link: re.Match[str]) -> str:
    return link[1] if OUTSIDE.match(link[2]) else link[0]
