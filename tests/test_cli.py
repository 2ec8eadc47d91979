"""The command line, run as a user runs it."""

import json
import subprocess
import sys

import pytest

import kvprune


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


def test_demo_json():
    done = run("demo", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["open_difference"] < 1e-5
    assert result["detached_difference"] == 0
    shares = [row["sparsity"] for row in result["rows"]]
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] > 0.5
    last = result["rows"][-1]
    assert last["cache_bytes"] < 0.5 * last["dense_bytes"]
    assert any(not stays for layer in result["kept"] for stays in layer)


def test_demo_for_people():
    done = run("demo")
    assert done.returncode == 0, done.stderr
    assert "Closing the gates" in done.stdout


def test_a_user_error_is_one_line_and_exit_code_2(monkeypatch, capsys):
    from kvprune import cli

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
