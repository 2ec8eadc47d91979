"""Fair timing: calls in turn, ratios within a round; and the machine it was measured on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("kvprune", "torch", "transformers", "numba")


class Spread(NamedTuple):
    """A median with its quartiles; of fewer than five numbers, with minimum and maximum."""

    median: float
    low: float
    high: float


def interleave(
    repeats: int, calls: Mapping[str, Callable[[], object]], warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call, round-robin: what slows the machine down affects all of them."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    """slow / fast round by round: both of a pair were measured at nearly the same time."""
    return [s / f for s, f in zip(slow, fast, strict=True)]


def ratio(slow: list[float], fast: list[float]) -> float:
    """The median over rounds of slow / fast."""
    return statistics.median(ratios(slow, fast))


def spread(values: list[float]) -> Spread:
    if len(values) < 5:
        return Spread(statistics.median(values), min(values), max(values))
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, low, high)


def machine() -> dict[str, str | int]:
    """The name and cores of the CPU; with CUDA, the GPU's name as well."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((l.split(":")[1].strip() for l in lines if l.startswith("model name")), name)
    about: dict[str, str | int] = {"cpu": name, "cores": os.cpu_count() or 1}
    about["system"] = platform.system()
    import torch

    if torch.cuda.is_available():
        about["gpu"] = torch.cuda.get_device_name()
    return about


def versions() -> dict[str, str]:
    """Of Python and the packages that determine the speed; a missing one is left out."""
    numbers = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            numbers[package] = version(package)
        except PackageNotFoundError:
            continue
    return numbers
