"""What the doctor found, as plain values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Fact:
    """Something about the machine; `good` is None where it is neither."""

    name: str
    value: str
    note: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Choice:
    """Which backend an operation will use for tensors of some dtypes, and why no faster one."""

    operation: str
    used_for: str
    dtypes: tuple[str, ...]
    backend: str
    why: str


@dataclass(frozen=True)
class Test:
    """A kernel against its reference, on the same numbers."""

    operation: str
    backend: str
    dtype: str
    error: float  # the largest
    allowed: float
    seconds: float
    problem: str = ""  # of a kernel that did not even run

    @property
    def passed(self) -> bool:
        # a NaN is not small
        return not self.problem and self.error <= self.allowed


@dataclass(frozen=True)
class Speed:
    """Bytes per second, and their share of the most that copying or reading reaches."""

    name: str
    bytes_per_second: float
    share: float | None = None


@dataclass
class Report:
    device: str
    machine: list[Fact]
    versions: dict[str, str]
    extras: list[Fact]
    models: list[Fact]
    choices: list[Choice]
    tests: list[Test] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)

    @property
    def failed(self) -> list[Test]:
        return [test for test in self.tests if not test.passed]

    def to_dict(self) -> dict[str, Any]:
        tests = [
            # JSON knows neither infinity nor NaN
            {**asdict(test), "error": test.error if math.isfinite(test.error) else None,
             "passed": test.passed}
            for test in self.tests
        ]  # fmt: skip
        return {**asdict(self), "tests": tests, "passed": not self.failed}
