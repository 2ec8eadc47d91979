"""One dispatcher chooses, loads and refuses the backends of every operation."""

import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from kvprune.errors import PruneError
from kvprune.ops.alpha_sigmoid import ALPHA_SIGMOID, LOG_ALPHA_SIGMOID
from kvprune.ops.decode import DECODE
from kvprune.ops.dispatch import BACKENDS, Operation
from kvprune.ops.int8 import reference
from kvprune.ops.keep import LOG_KEEP, LOG_KEEP_BACKWARD

OPERATIONS = [ALPHA_SIGMOID, LOG_ALPHA_SIGMOID, LOG_KEEP, LOG_KEEP_BACKWARD, DECODE]
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda x: x.name)


@every_operation
def test_every_backend_has_every_function(operation):
    x = torch.zeros(1)
    functions = [operation.implementation(x, name) for name in operation.available()]
    assert {function.__name__ for function in functions} == {operation.name}
    here = [name for name in operation.dtypes if BACKENDS[name].device == "cpu"]
    assert len(set(functions)) == len(operation.available()) == 1 + len(here)


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


class OnDevice(NamedTuple):
    """What the choice looks at, of a tensor on a device that is not here."""

    dtype: torch.dtype
    device: torch.device
    is_cuda: bool = True


@pytest.fixture
def quantise(monkeypatch):
    operation = Operation(reference.quantise, cpu=[torch.float32], triton=[torch.bfloat16])
    monkeypatch.setattr("kvprune.ops.dispatch.find_spec", lambda package: package)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    return operation


def test_triton_on_a_gpu(quantise, monkeypatch):
    x = OnDevice(torch.bfloat16, torch.device("cuda", 0))
    assert quantise.best_backend(x) == "triton"
    assert quantise.available(device="cuda") == ["reference", "triton"]
    assert quantise.available() == ["reference", "cpu"]
    assert quantise.best_backend(x._replace(dtype=torch.float32)) == "reference"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert quantise.best_backend(x) == "reference"
    with pytest.raises(PruneError, match=r"compute capability 8\.0.*cuda:0.*use one of reference"):
        quantise.implementation(x, "triton")
    # AMD's numbers mean something else
    monkeypatch.setattr("torch.version.hip", "7.0")
    assert quantise.best_backend(x) == "triton"


def test_without_triton_the_reference_runs_on_a_gpu(quantise, monkeypatch):
    monkeypatch.setattr("kvprune.ops.dispatch.find_spec", lambda package: None)
    x = OnDevice(torch.bfloat16, torch.device("cuda", 0))
    assert quantise.best_backend(x) == "reference"
    with pytest.raises(PruneError, match=r"quantise needs triton; use one of reference"):
        quantise.implementation(x, "triton")


def test_triton_on_a_cpu_needs_the_interpreter(quantise):
    with pytest.raises(PruneError, match=r"on cuda, not .* on cpu; .*TRITON_INTERPRET=1"):
        quantise.implementation(torch.zeros(1, dtype=torch.bfloat16), "triton")


def test_import_leaves_the_compilers_alone():
    modules = "kvprune.ops.alpha_sigmoid, kvprune.ops.decode, kvprune.ops.attend.soft"
    modules += ", kvprune.ops.hard, kvprune.ops.keep.drop"
    code = f"import sys, {modules}; sys.exit(bool({{'numba', 'triton'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_never_needs_no_torch():
    code = "import sys, kvprune.ops.never; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
