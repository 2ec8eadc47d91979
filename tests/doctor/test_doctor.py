"""The doctor: it knows every kernel, sees a wrong one, and says why plain torch is used."""

import importlib
import json
import math
import pkgutil

import pytest
import torch
from typer.testing import CliRunner

import kvprune.ops
from kvprune.cli import app
from kvprune.doctor import examine, find_device, machine, operations, speed
from kvprune.doctor.choices import choices
from kvprune.doctor.inputs import difference
from kvprune.doctor.machine import _packages
from kvprune.doctor.operations import ENTRIES
from kvprune.doctor.self_test import self_tests
from kvprune.errors import PruneError
from kvprune.ops.decode import DECODE
from kvprune.ops.dispatch import BACKENDS, Operation
from kvprune.ops.norm import RMS_NORM

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tests():
    return self_tests(CPU)


@pytest.fixture
def small(monkeypatch):
    """As many bytes as the test needs, not as the measurement does."""
    monkeypatch.setattr(speed, "TOKENS", 64)
    monkeypatch.setattr(speed, "BLOCK", 2**16)


def test_every_operation_is_examined():
    modules = pkgutil.walk_packages(kvprune.ops.__path__, "kvprune.ops.")
    # kernels are in modules of their own, and Triton's need Triton
    plain = [module.name for module in modules if "triton" not in module.name]
    found = {value.name for name in plain for value in vars(importlib.import_module(name)).values()
             if isinstance(value, Operation)}  # fmt: skip
    assert found == {entry.operation.name for entry in ENTRIES}


def test_every_kernel_here_is_right(tests):
    assert [test for test in tests if not test.passed] == []
    kernels = {(entry.operation.name, str(dtype).removeprefix("torch."))
               for entry in ENTRIES for dtype in entry.operation.dtypes.get("cpu", ())}  # fmt: skip
    assert {(test.operation, test.dtype) for test in tests} == kernels
    assert all(test.backend == "cpu" for test in tests)


def test_plain_torch_on_the_cpu_is_itself():
    """The inputs are the same numbers on both sides."""
    for entry in ENTRIES:
        dtype = entry.dtypes[0]
        assert entry.error("reference", dtype, CPU) <= entry.allowed[dtype]


def test_a_wrong_kernel_fails(monkeypatch):
    right = RMS_NORM.implementation(torch.zeros(1), "cpu")

    def replaced(function):
        for dtype in (torch.float32, torch.bfloat16):
            monkeypatch.setitem(RMS_NORM._chosen, ("cpu", dtype, CPU), function)
        return {t.dtype: t for t in self_tests(CPU) if t.operation == "rms_norm"}

    wrong = replaced(lambda x, *rest: right(x, *rest) * 1.05)
    assert [test.passed for test in wrong.values()] == [False, False]
    assert 0.02 < wrong["float32"].error < 0.06
    nan = replaced(lambda x, *rest: right(x, *rest) * math.nan)
    assert not any(test.passed for test in nan.values())

    def refuses(*given):
        raise RuntimeError("no kernel image is available\nfor this device")

    broken = replaced(refuses)["float32"]
    assert not broken.passed
    assert broken.problem == "RuntimeError: no kernel image is available"


def test_a_token_that_stays_too_long_is_no_small_error(monkeypatch):
    right = DECODE.implementation(torch.zeros(1), "cpu")

    def lenient(table, new, form, *, votes, **rest):
        return right(table, new, form, votes=votes._replace(threshold=-0.5), **rest)

    monkeypatch.setitem(DECODE._chosen, ("cpu", torch.float32, CPU), lenient)
    entry = next(entry for entry in ENTRIES if entry.operation is DECODE)
    assert entry.error("cpu", torch.float32, CPU) == math.inf


def test_differences():
    a = torch.tensor([1.0, -torch.inf, 3.0])
    assert difference(a, a) == 0
    assert difference(a, torch.tensor([1.0, -torch.inf, 3.5])) == pytest.approx(0.5 / 4.5)
    assert not difference(torch.tensor([torch.nan]), torch.tensor([1.0])) <= 1e9
    assert difference(a, a[:2]) == math.inf
    assert difference(a.where(a != 3, torch.inf), a) == math.inf


def test_why_plain_torch(monkeypatch):
    by = {(c.operation, dtype): c for c in choices(CPU) for dtype in c.dtypes}
    assert by["decode", "int8"].backend == "cpu"
    assert by["decode", "int8"].why == ""
    assert by["rms_norm", "float16"].backend == "reference"
    assert by["rms_norm", "float16"].why == "cpu takes float32, bfloat16"
    elsewhere = choices(torch.device("meta"))
    assert {(c.backend, c.why) for c in elsewhere} == {("reference", "no kernel for meta")}
    monkeypatch.setattr("kvprune.ops.hard.tile.has_bfloat16_products", lambda: False)
    by = {(c.operation, dtype): c for c in choices(CPU) for dtype in c.dtypes}
    assert by["hard_attention", "bfloat16"].why == "this CPU has no products of bfloat16"
    monkeypatch.setitem(BACKENDS, "cpu", BACKENDS["cpu"]._replace(package="not_here"))
    assert "not_here is not installed" in {c.why for c in choices(CPU)}


def test_extras_are_read_from_the_packages_own_metadata(monkeypatch):
    lines = [
        "torch>=2.6", "peft>=0.17; extra == 'train'", "no-such-thing>=1; extra == 'plot'",
        "kvprune[plot]; extra == 'eval'", 'torch; extra == "eval"',
    ]  # fmt: skip
    assert _packages("eval", lines) == ["no-such-thing", "torch"]
    monkeypatch.setattr(machine, "requires", lambda _: lines)
    facts = {fact.name: fact for fact in machine.extras()}
    assert facts["serve"].good
    assert facts["eval"].value == "without no-such-thing"
    assert facts["eval"].note == "pip install 'kvprune[eval]'"


def test_devices():
    assert find_device("cpu") == CPU
    for name in ("toaster", "cuda:77"):
        with pytest.raises(PruneError, match=f"no device '{name}' here.*leave --device out"):
            find_device(name)


def test_all_of_it_as_json(small):
    report = examine("cpu")
    document = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert document["passed"]
    assert [s["name"] for s in document["speeds"]][:2] == ["copy", "read"]
    assert all(s["bytes_per_second"] > 0 for s in document["speeds"])
    facts = {fact["name"]: fact for fact in document["machine"]}
    assert facts["threads"]["value"] == str(torch.get_num_threads())
    assert document["versions"]["torch"] == torch.__version__


def test_the_table_aligns_and_a_failure_is_the_exit_code(small, monkeypatch):
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--no-speed"])
    assert done.exit_code == 0, done.output
    assert "self-tests passed" in done.stdout
    lines = done.stdout.splitlines()
    start = lines.index("what runs")
    column = lines[start + 1].index("by ")
    body = lines[start + 2 : lines.index("", start)]
    assert len(body) >= len(ENTRIES)
    assert all(line[column - 1] == " " and line[column] != " " for line in body)
    wrong = ENTRIES[0]._replace(error=lambda *_: 0.5)
    monkeypatch.setattr("kvprune.doctor.self_test.ENTRIES", (wrong,))
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--no-speed"])
    assert done.exit_code == 1
    assert "4 of 4 self-tests failed" in done.stdout
    assert "wrong" in done.stdout
    done = CliRunner().invoke(app, ["doctor", "--device", "cpu", "--no-speed", "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout)["passed"] is False


def test_tolerances_are_for_every_dtype():
    for entry in ENTRIES:
        assert set(entry.dtypes) <= entry.allowed.keys()
    assert operations.ROUNDING[torch.float32] < 1e-4
