"""The kernels in Triton's interpreter: each file of `interpreted` in a process of its own."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))


@pytest.mark.skipif(not find_spec("triton"), reason="there is no Triton for this system")
@pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="this is the child process")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_interpreter(file):
    # kernels need neither transformers nor a browser, which tests/conftest.py imports
    command = [sys.executable, "-m", "pytest", str(file), f"--confcutdir={file.parents[1]}"]
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    # of the parent process' pytest
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        env.pop(name, None)
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    # neither none collected nor all skipped
    assert re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout
