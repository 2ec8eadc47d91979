"""The command line, run as a user runs it."""

import json
import subprocess
import sys

import pytest

import kvprune
from kvprune import cli, demo
from kvprune.cli.demo import _show


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", "from kvprune.cli import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_help_does_not_import_torch():
    code = "import sys, kvprune.cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]
    done = run("--help")
    assert done.returncode == 0
    assert "demo" in done.stdout


def test_version():
    assert run("--version").stdout.strip() == f"kvprune {kvprune.__version__}"


def test_demo(tmp_path, capsys):
    done = run("demo", "--json", "--steps", "3", "--save", str(tmp_path / "model"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    dense, pruned = result["dense"], result["pruned"]
    assert dense["perplexity"] < 100
    assert pruned["perplexity"] < 2 * dense["perplexity"]
    assert all(0 <= share <= 1 for share in pruned["sparsity"].values())
    assert pruned["cache_bytes"] < 1.2 * dense["cache_bytes"]
    assert "3/3" in done.stderr  # the progress bar
    own = {name: demo.Measurements(**result.pop(name)) for name in ("dense", "pruned")}
    _show(demo.Run(**own, **result), None)
    assert "context pruned at 512 tokens" in capsys.readouterr().out
    again = run("generate", str(tmp_path / "model"), "Once", "--adapter", str(tmp_path / "model"),
                "--max-new-tokens", "5")  # fmt: skip
    assert again.returncode == 0, again.stderr


def test_a_user_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    def fail():
        raise kvprune.PruneError("window=0 must be a whole number, 1 or more")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == "kvprune: window=0 must be a whole number, 1 or more\n"


def test_public_names():
    for name in kvprune.__all__:
        assert getattr(kvprune, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'prune'"):
        kvprune.prune  # noqa: B018
    assert callable(kvprune.attach)
    assert "attach" in dir(kvprune)
