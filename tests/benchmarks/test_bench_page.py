"""The page of ratios, written as by `make bench`."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks/page.py"


def run(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), "--results", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_ratio_is_next_to_its_bar(tmp_path):
    about = {"machine": {"cpu": "Z80", "cores": 1}, "versions": {"torch": "2"}}
    for size, ratios in (
        ("bench", {"time_1000": 1.234, "time_8192": 0.5, "new": 3.0}),
        ("full", {"time_1000": 1.1}),
    ):
        (tmp_path / size).mkdir()
        saved = {"ratios": ratios, "command": "python x", **about}
        (tmp_path / size / "prefill.json").write_text(json.dumps(saved))
    result = run(tmp_path)
    assert result.returncode == 0, result.stderr
    text = (tmp_path / "README.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines()]
    rows = [row for row in rows if row[0].startswith("| ") and len(row) == 5]
    assert [row[1:4] for row in rows] == [
        ["`make bench`", "full", "bar"],
        ["1.23 ✗", "1.1", "≤ 1.15"], ["0.5", "—", "≤ 0.8"], ["3", "—", ""],
    ]  # fmt: skip
    assert "make bench: Z80, 1 cores, torch 2." in text


def test_without_results_no_page_is_written(tmp_path):
    result = run(tmp_path)
    assert result.returncode != 0
    assert "run the benchmarks with --save first" in result.stderr
    assert not (tmp_path / "README.md").exists()
