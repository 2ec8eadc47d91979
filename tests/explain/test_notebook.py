"""The example notebook runs from start to end."""

import os
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "explore.ipynb"


def test_explore_notebook(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    pages = [out.data["text/html"] for out in outputs if "text/html" in out.get("data", {})]
    assert any("dropped in" in html for html in pages)
    page = (tmp_path / "explain.html").read_text()
    assert "<h1>What a few steps of training forget</h1>" in page
    assert [out for out in outputs if "image/png" in out.get("data", {})]
    # training worked: tokens were dropped
    (table,) = [out for out in outputs if "dropper" in out.get("data", {}).get("text/plain", "")]
    assert len(table.data["text/plain"].splitlines()) > 3
