"""The page of ratios, made as `make bench` makes it."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks/page.py"


def run(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), "--results", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_each_ratio_stands_beside_its_bar(tmp_path):
    about = {"machine": {"cpu": "Z80", "cores": 1}, "versions": {"torch": "2"}}
    ratios = {"time_1000": 1.234, "time_8192": 0.5, "new": 3.0}
    saved = {"ratios": ratios, "command": "python x", **about}
    (tmp_path / "prefill.json").write_text(json.dumps(saved))
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in (tmp_path / "README.md").read_text().splitlines()]
    rows = [row for row in rows if row[0].startswith("| ") and len(row) == 5]
    assert [row[1:3] for row in rows] == [
        ["ratio", "bar"], ["1.23 ✗", "≤ 1"], ["0.5", "≤ 0.8"], ["3", ""],
    ]  # fmt: skip
    assert rows[1][3:] == ["`python x`", "Z80, 1 cores |"]


def test_no_results_no_page(tmp_path):
    done = run(tmp_path)
    assert done.returncode != 0
    assert "run the benchmarks with --save first" in done.stderr
    assert not (tmp_path / "README.md").exists()
