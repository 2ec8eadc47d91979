"""How OpenMP's threads wait, chosen before torch is imported and never against the user."""

import os
import subprocess
import sys

import pytest

from kvprune.utils.openmp import CHOICES, SPINS


def output(code: str, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in CHOICES}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | env, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def spins(code: str, **env: str) -> str:
    return output(f"import os\n{code}\nprint(os.environ.get('GOMP_SPINCOUNT'))", **env).strip()


@pytest.mark.parametrize("code", ["import kvprune", "import kvprune.cli", "import kvprune.errors"])
def test_set_by_any_import_of_the_package(code):
    assert spins(code) == SPINS


@pytest.mark.parametrize("name", CHOICES)
def test_the_users_choice_stays(name):
    set_by_user = {name: "7"}
    assert spins("import kvprune", **set_by_user) == str(set_by_user.get("GOMP_SPINCOUNT"))


def test_too_late_after_torch():
    assert spins("import torch, kvprune") == "None"


@pytest.mark.skipif(sys.platform != "linux", reason="libgomp is the OpenMP of torch on Linux only")
def test_torch_and_numba_wait_so():
    """Both runtimes print what they read; of two copies in one process each has its own pool."""
    code = """if True:
        import kvprune, torch, numpy
        from kvprune.ops.jit import njit
        from numba import prange, threading_layer
        @njit(parallel=True)
        def fill(x):
            for i in prange(len(x)):
                x[i] = i
        fill(numpy.zeros(9))
        assert threading_layer() == "omp", threading_layer()"""
    said = output(code, OMP_DISPLAY_ENV="verbose", NUMBA_THREADING_LAYER="omp")
    lines = [line for line in said.splitlines() if "GOMP_SPINCOUNT" in line]
    assert lines
    assert all(f"'{SPINS}'" in line for line in lines), lines
