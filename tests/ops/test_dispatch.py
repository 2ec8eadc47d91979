"""One dispatcher chooses, loads and refuses the backends of every operation."""

import subprocess
import sys

import pytest
import torch

from kvprune.errors import PruneError
from kvprune.ops.alpha_sigmoid import ALPHA_SIGMOID, LOG_ALPHA_SIGMOID
from kvprune.ops.decode import DECODE
from kvprune.ops.dispatch import BACKENDS
from kvprune.ops.keep import LOG_KEEP, LOG_KEEP_BACKWARD

OPERATIONS = [ALPHA_SIGMOID, LOG_ALPHA_SIGMOID, LOG_KEEP, LOG_KEEP_BACKWARD, DECODE]
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda x: x.name)


@every_operation
def test_every_backend_has_every_function(operation):
    x = torch.zeros(1)
    functions = [operation.implementation(x, name) for name in operation.available()]
    assert {function.__name__ for function in functions} == {operation.name}
    assert len(set(functions)) == len(operation.available()) == 1 + len(operation.dtypes)


@every_operation
def test_the_fastest_that_fits(operation):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.zeros(1, dtype=dtype)
        name = "cpu" if dtype in operation.dtypes["cpu"] else "reference"
        assert operation.best_backend(x) == name
        assert operation.implementation(x) is operation.implementation(x, name)
        meta = x.to("meta")
        assert operation.implementation(meta) is operation.implementation(x, "reference")


@every_operation
def test_refuses_an_unknown_or_unfit_backend(operation):
    with pytest.raises(PruneError, match=rf"{operation.name}.*'abacus'.*reference, cpu"):
        operation.implementation(torch.zeros(1), "abacus")
    with pytest.raises(PruneError, match=r"float32.* tensors on cpu, not torch.float64.*reference"):
        operation.implementation(torch.zeros(1, dtype=torch.float64), "cpu")
    with pytest.raises(PruneError, match=r"torch.float32 on meta"):
        operation.implementation(torch.zeros(1, device="meta"), "cpu")


def test_without_the_package_the_reference_runs(monkeypatch):
    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cpu"]._replace(package="not_installed"))
    assert DECODE.available() == ["reference"]
    assert DECODE.best_backend(torch.zeros(1)) == "reference"


def test_import_leaves_numba_alone():
    modules = "kvprune.ops.alpha_sigmoid, kvprune.ops.decode, kvprune.ops.attend.soft"
    code = f"import sys, {modules}; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_never_needs_no_torch():
    code = "import sys, kvprune.ops.never; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
