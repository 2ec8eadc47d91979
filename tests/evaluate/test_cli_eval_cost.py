"""kvprune eval cost, throughput and compare, as a user runs them."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import kvprune
from kvprune.adapters.pretrained import load_base
from kvprune.cli import app
from kvprune.errors import PruneError
from kvprune.utils.parse import in_bytes, numbers


def run(*args: str):
    result = CliRunner().invoke(app, ["eval", *args])
    assert result.exception is None, result.exception
    return result


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    torch.manual_seed(0)
    pruned = kvprune.attach(load_base("tiny"), kvprune.PruningConfig(rank=8, beta=1.0))
    folder = tmp_path_factory.mktemp("adapter")
    pruned.save(folder)
    return str(folder)


def test_nothing_heavy_is_imported_for_help():
    code = (
        "import sys, kvprune.cli.evaluate as e; print({'torch', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "set()"
    for command in ("cost", "throughput", "compare"):
        assert command in run("--help").stdout


def test_cost(tmp_path):
    result = run("cost", "tiny", "--sparsity", "0.5", "--context", "100,400", "--batch", "2",
                 "--rank", "16", "--dtype", "bfloat16", "--out", str(tmp_path),
                 "--json")  # fmt: skip
    document = json.loads(result.stdout)
    assert document == json.loads((tmp_path / "cost.json").read_text())
    dense, pruned = (r for p in document["points"] for r in p["rows"] if r["context"] == 400)
    assert dense["cache_bytes"] == 2 * 6 * 400 * 2 * 256 * 2
    assert pruned["bytes"]["interaction_keys"] == 2 * 6 * 200 * 16 * 2
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "cost.svg").read_text().startswith("<?xml")
    assert "wrote" in result.stderr


def test_cost_for_people():
    shown = run("cost", "gpt2", "--context", "1000").stdout
    for text in ("drop-tokens", "pruned 80%", "70.3 MiB", "0.208 ×", "float32"):
        assert text in shown


def test_throughput_resumes(tmp_path, adapter, monkeypatch):
    options = ("throughput", "tiny", "--adapter", adapter, "--context", "20,40", "--batch", "1,2",
               "--steps", "1", "--repeats", "1", "--baseline", "local", "--out",
               str(tmp_path))  # fmt: skip
    first = json.loads(run(*options, "--json").stdout)
    rows = [row for point in first["points"] for row in point["rows"]]
    assert len(rows) == 2 * 2 * (2 + 3)
    assert first["about"]["machine"]["cores"] >= 1
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("kvprune.evaluate.throughput.run.interleave", None)
    assert json.loads(run(*options, "--json").stdout) == first
    shown = run(*options).stdout
    for text in ("realistic", "ideal 80%", "best batch", "local"):
        assert text in shown
    compared = run("compare", str(tmp_path), "--out", str(tmp_path / "page"))
    assert "tiny" in compared.stdout
    assert "<svg" in (tmp_path / "page" / "compare.html").read_text()
    assert len(json.loads(run("compare", str(tmp_path), "--json").stdout)["rows"]) == 2


def test_throughput_of_random_weights_within_memory():
    result = run("throughput", "tiny", "--random", "--context", "20", "--memory", "1MB",
                 "--steps", "1", "--repeats", "1", "--json")  # fmt: skip
    rows = [row for point in json.loads(result.stdout)["points"] for row in point["rows"]]
    # the weights alone are larger, so only the first batch was tried
    assert {row["batch"] for row in rows} == {1}


def test_lists_and_sizes():
    assert numbers("1, 8,8,32", int, "--batch") == [1, 8, 32]
    sizes = ("4GB", "512MiB", "1.5k", "100", "2 TiB")
    assert [in_bytes(text, "--memory") for text in sizes] == [
        4 * 10**9, 512 * 2**20, 1500, 100, 2 * 2**40,
    ]  # fmt: skip
    with pytest.raises(PruneError, match=r"--batch '1,x' must be whole numbers with commas"):
        numbers("1,x", int, "--batch")
    for text in ("much", "4XB", "", "1.2.3G"):
        with pytest.raises(PruneError, match=r"must be a size such as 4GB"):
            in_bytes(text, "--memory")
