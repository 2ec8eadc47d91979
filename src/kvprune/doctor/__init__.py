"""What this machine has, which kernels it will use and why, whether they are right, how fast."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvprune.doctor.choices import choices
from kvprune.doctor.machine import describe, extras, models, versions
from kvprune.doctor.report import Report
from kvprune.doctor.self_test import self_tests
from kvprune.doctor.speed import speeds
from kvprune.errors import PruneError

__all__ = ["Report", "examine"]


def examine(
    device: str = "auto",
    tests: bool = True,
    speed: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Look at everything, in seconds; `tell` is called with what is being done.

    The first time on a machine, kernels are compiled: a minute more.
    """
    place = find_device(device)
    report = Report(
        device=str(place),
        machine=describe(place),
        versions=versions(),
        extras=extras(),
        models=models(),
        choices=choices(place),
    )
    from kvprune.ops.jit import on_compile

    if tests:
        tell("testing each kernel against its reference")
        with on_compile(lambda: tell("compiling a kernel for this machine, once")):
            report.tests = self_tests(place)
    if speed:
        tell("measuring the memory's bandwidth, and decoding's")
        report.speeds = speeds(place)
    return report


def find_device(name: str) -> torch.device:
    """The device of this name; auto: the accelerator, or else the CPU."""
    if name == "auto":
        found = (
            torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        )
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise PruneError(
            f"there is no device {name!r} here: {str(error).splitlines()[0]}; use cpu, or leave "
            f"--device out"
        ) from error
    return device
