"""The GPU benchmark: it runs to the end on a CPU, refuses what is wrong, and says what it lacks."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvprune.ops.decode import DECODE

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_without_a_gpu_it_says_so(tmp_path):
    done = run("--out", str(tmp_path))
    assert done.returncode == 2
    assert "finds no GPU here" in done.stderr
    assert "--dry-run" in done.stderr
    assert not done.stdout
    assert not [*tmp_path.iterdir()]


def test_a_dry_run_goes_through_every_part(tmp_path):
    done = run("--dry-run", "--rounds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    text = (tmp_path / "gpu.md").read_text()
    assert text.strip() == done.stdout.strip()
    assert result["counts"] is False
    assert "these times mean nothing" in text
    rows = result["rows"]
    parts = {part: {row["who"] for row in rows if row["part"] == part}
             for part in ("launch", "decode", "model", "prefill", "train", "memory")}  # fmt: skip
    assert all(parts.values())
    dense = {"SDPA", "flash attention", "FlexAttention"}
    assert parts["decode"] == parts["prefill"] == {"kvprune", *dense}
    assert parts["model"] == {"kvprune", "kvprune, compiled", "DynamicCache", "StaticCache",
                              "StaticCache, compiled"}  # fmt: skip
    assert not [row for row in rows if row["who"].startswith("kvprune") and row["problem"]]
    assert not [row for row in rows if row["problem"].startswith("wrong")]
    timed = [row for row in rows if not row["problem"] and row["part"] != "memory"]
    assert all(row["seconds"] > 0 for row in timed)
    assert all(row["ratio"] == 1 for row in timed if row["who"] == "kvprune")
    assert (tmp_path / "gpu.png").stat().st_size > 10_000
    for line in text.splitlines():
        assert not line.startswith("| ") or line.count("|") > 2


def test_what_is_wrong_is_not_timed(monkeypatch, capsys, tmp_path):
    import gpu
    from on_gpu import correct

    right = DECODE.implementation(torch.zeros(1), "cpu")

    def wrong(*given, **more):
        done = right(*given, **more)
        return done._replace(output=done.output * 1.1)

    monkeypatch.setitem(DECODE._chosen, ("cpu", torch.float32, CPU), wrong)
    found = correct.problems(CPU, None)
    assert len(found) == 1
    assert found[0].startswith("decode by cpu in float32: off by")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        gpu.main()
    assert stopped.value.code == 1
    said = capsys.readouterr()
    assert "nothing was timed, because results are wrong" in said.err
    assert found[0] in said.err
    assert not said.out
    assert not [*tmp_path.iterdir()]


def test_a_model_that_differs_is_found(monkeypatch):
    """Kernels may be right one by one, and a model with them wrong."""
    from on_gpu import correct

    assert correct._written(CPU) == correct._trained(CPU) == []
    monkeypatch.setattr(correct, "self_tests", lambda device: [])
    betas = iter([1.5, 1.4, 1.5, 1.4])
    real = correct.set_beta
    monkeypatch.setattr(correct, "set_beta", lambda pruned, beta: real(pruned, next(betas)))
    found = correct.problems(CPU, None)
    assert any("a model holds" in line for line in found)
    assert any(line.startswith("gradient of") for line in found)


def test_each_contestant_is_compared_first():
    from on_gpu.race import Contestant, race

    one, called = torch.ones(3), []

    def refuses():
        raise RuntimeError("no kernel for this head size\nand more")

    rows = race(CPU, 3, "part", "case", {
        "right": Contestant(lambda: called.append(1) or one, lambda: one + 1e-5),
        "far": Contestant(lambda: one * 1.1, lambda: one),
        "nan": Contestant(lambda: one * math.nan, lambda: one),
        "missing": Contestant(refuses, lambda: one),
    })  # fmt: skip
    by = {row["who"]: row for row in rows}
    assert by["right"]["problem"] == ""
    assert len(by["right"]["all"]) == 3
    assert len(called) == 5
    assert by["far"]["problem"].startswith("wrong: off by 0.05")
    assert by["nan"]["problem"].startswith("wrong: off by nan")
    assert by["missing"]["problem"] == "does not run: no kernel for this head size"
    assert all(by[name]["seconds"] is None for name in ("far", "nan", "missing"))


def test_the_table_puts_cases_down_and_contestants_across():
    from on_gpu.paste import markdown, with_ratios

    def row(who, case, seconds, problem=""):
        return {"part": "decode", "case": case, "who": who, "seconds": seconds,
                "problem": problem, "all": []}  # fmt: skip

    rows = with_ratios([
        row("kvprune", "1 × 8", 2e-6), row("SDPA", "1 × 8", 3e-6),
        row("kvprune", "1 × 9", 2e-3), row("SDPA", "1 × 9", None, "out of memory"),
    ])  # fmt: skip
    found = {
        "machine": {"gpu": "A100"}, "versions": {"torch": "2"}, "command": "python x",
        "model": "m", "dtype": "bfloat16", "sparsity": 0.8, "rounds": 3, "counts": True,
        "rows": rows,
    }  # fmt: skip
    text = markdown(found)
    assert "### kvprune on A100" in text
    assert "mean nothing" not in text
    assert "| 1 × 8 | 2.0 µs (1.00 ×) | 3.0 µs (1.50 ×) |" in text
    assert "| 1 × 9 | 2.00 ms (1.00 ×) | — |" in text
    assert "- SDPA: out of memory" in text
