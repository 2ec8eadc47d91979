"""Every kernel that can run here against the plain version, on small inputs."""

from __future__ import annotations

import math
import time

import torch

from kvprune.doctor.operations import ENTRIES, Entry, name_of
from kvprune.doctor.report import Test
from kvprune.ops.dispatch import REFERENCE


def self_tests(device: torch.device) -> list[Test]:
    """On a GPU plain torch is tested too, against the same on the CPU."""
    return [
        self_test(entry, backend, dtype, device)
        for entry in ENTRIES
        for backend in _backends(entry, device)
        for dtype in entry.dtypes
        if backend == REFERENCE or dtype in entry.operation.dtypes[backend]
    ]


def self_test(entry: Entry, backend: str, dtype: torch.dtype, device: torch.device) -> Test:
    """One kernel; one that cannot be compiled or launched fails, and the others go on."""
    start, problem, error = time.perf_counter(), "", math.inf
    try:
        error = entry.error(backend, dtype, device)
    except Exception as broken:  # of compiler, driver or kernel: this is what the doctor is for
        problem = f"{type(broken).__name__}: {broken}".splitlines()[0]
    seconds = time.perf_counter() - start
    allowed = entry.allowed[dtype]
    return Test(entry.operation.name, backend, name_of(dtype), error, allowed, seconds, problem)


def _backends(entry: Entry, device: torch.device) -> list[str]:
    exclude = REFERENCE if device.type == "cpu" else ()
    return entry.operation.available(exclude, device.type)
