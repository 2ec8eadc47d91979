"""The documentation follows the code: generated pages are current, and what it names exists."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvprune

ROOT = Path(__file__).parents[2]
GUIDES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md",
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "cli"),
]  # fmt: skip
PACKAGES = sorted(path.name for path in (ROOT / "src/kvprune").iterdir() if path.is_dir())


def test_cli_pages_are_current():
    command = [sys.executable, "scripts/cli_docs.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_exported_name_is_in_the_api_reference():
    page = (ROOT / "docs/api/kvprune.md").read_text()
    listed = set(re.findall(r"^::: kvprune\.(\w+)$", page, re.MULTILINE))
    assert listed == set(kvprune.__all__) - {"__version__"}


def test_the_picture_of_the_layers_is_current():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import architecture_svg
    finally:
        sys.path.pop(0)
    picture = architecture_svg.draw(architecture_svg.layers())
    assert architecture_svg.OUT.read_text() == picture, "run python scripts/architecture_svg.py"


def test_functions_that_the_architecture_links_to_are_there():
    text = (ROOT / "docs/architecture.md").read_text()
    linked = re.findall(r"\[`([\w.]+)`\]\(\.\./(src/[\w/]+\.py)\)", text)
    assert len(linked) > 20
    missing = [
        (name, file)
        for name, file in linked
        if not name.endswith(".py")
        for part in [name.split(".")[-1]]
        if not re.search(rf"(def|class) {part}\b", (ROOT / file).read_text())
    ]
    assert missing == []


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_files_and_modules_exist(guide):
    text = guide.read_text()
    missing = [name for name in named_paths(text) if not exists(name, guide.parent)]
    missing += [link for link in links(text) if not (guide.parent / link).exists()]
    missing += [name for name in named_modules(text) if not importable(name)]
    assert missing == []


def named_paths(text: str) -> list[str]:
    """`src/kvprune/x.py`, `experiments/x.py`; within the package or its tests `ops/x.py`."""
    quoted = re.findall(r"`((?:[\w*.-]+/)+[\w*.-]+\.(?:py|md|yaml|json|ipynb)|\w+\.py)`", text)
    commands = re.findall(r"python ((?:experiments|benchmarks|scripts|examples)/[\w/]+\.py)", text)
    modules = re.findall(r"python -m (experiments(?:\.\w+)+)", text)
    return sorted({*quoted, *commands, *(f"{name.replace('.', '/')}.py" for name in modules)})


def exists(name: str, folder: Path) -> bool:
    bases = (ROOT, ROOT / "src/kvprune", ROOT / "tests", folder)
    return any(True for base in bases for _ in base.glob(name))


def links(text: str) -> list[str]:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [target for target in targets if not target.startswith(("http:", "https:"))]


def named_modules(text: str) -> list[str]:
    return sorted(set(re.findall(rf"kvprune\.(?:{'|'.join(PACKAGES)})(?:\.\w+)+", text)))


def importable(name: str) -> bool:
    """A module, or a chain of attributes in one."""
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        if spec is not None:
            value = importlib.import_module(".".join(parts[:size]))
            for attribute in parts[size:]:
                if not hasattr(value, attribute):
                    return False
                value = getattr(value, attribute)
            return True
    return False
