"""Every package that the source imports is declared in pyproject.toml."""

import ast
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="tomllib is part of Python 3.11 and later")

ROOT = Path(__file__).parents[2]
# a better tagger where somebody has installed it; explain's extra brings HanTa
OPTIONAL = {"spacy"}


def imported() -> dict[str, set[str]]:
    """Third-party modules imported anywhere in src, with the files that import them."""
    files: dict[str, set[str]] = {}
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                files.setdefault(name.split(".")[0], set()).add(path.relative_to(ROOT).as_posix())
    own = {*sys.stdlib_module_names, "kvprune", *OPTIONAL}
    return {name: where for name, where in files.items() if name not in own}


def normalized(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def test_imports_are_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    users = [name for name in extras if name not in ("dev", "docs")]
    declared = {normalized(line) for line in project["dependencies"]}
    declared |= {normalized(line) for name in users for line in extras[name]}
    distributions = packages_distributions()
    for module, files in sorted(imported().items()):
        names = {normalized(name) for name in distributions.get(module, [module])}
        assert names & declared, f"{module}, imported by {sorted(files)}, is not in pyproject.toml"


def test_dev_tools_are_pinned():
    """A fresh clone gets the versions that were tested."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    pinned = {
        normalized(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    assert {normalized(line) for line in lines} - {"kvprune"} <= pinned
