"""Contestants side by side: each is compared with a plain version first, then timed in turn."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

# of outputs around 1, in the dtype that is measured
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
WARM_UP = 3

Row = dict[str, Any]


class Contestant(NamedTuple):
    """A call that returns what it computed, and what that must be: the same, computed plainly."""

    call: Callable[[], Tensor]
    want: Callable[[], Tensor] | None = None


def race(
    device: torch.device, rounds: int, part: str, case: str, contestants: Mapping[str, Contestant]
) -> list[Row]:
    """One row per contestant: median seconds, or what the problem is."""
    problems = {name: _problem(contestant) for name, contestant in contestants.items()}
    calls = {name: c.call for name, c in contestants.items() if not problems[name]}
    seconds = interleaved(device, rounds, calls)
    return [
        {
            "part": part, "case": case, "who": name, "problem": problem,
            "seconds": statistics.median(seconds[name]) if name in seconds else None,
            "all": seconds.get(name, []),
        }
        for name, problem in problems.items()
    ]  # fmt: skip


def interleaved(
    device: torch.device, rounds: int, calls: Mapping[str, Callable[[], object]]
) -> dict[str, list[float]]:
    """Seconds of each call, round-robin; on a GPU between two events of the stream."""
    for _ in range(WARM_UP if device.type != "cpu" else 1):
        for call in calls.values():
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            seconds[name].append(timed(device, call))
    return seconds


def timed(device: torch.device, call: Callable[[], object]) -> float:
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    before.record()
    call()
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after) / 1000


def _problem(contestant: Contestant) -> str:
    """Why it is not timed; empty if it is right."""
    try:
        got = contestant.call()
        if contestant.want is None:
            return ""
        want = contestant.want()
    except torch.OutOfMemoryError:
        return "out of memory"
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # a kernel that does not take this dtype, head size or device
        return f"does not run: {str(error).splitlines()[0][:100]}"
    gap = ((got.double() - want.double()).abs() / (1 + want.double().abs())).max()
    allowed = CLOSE[got.dtype]
    # so that a NaN is not close
    return "" if float(gap) <= allowed else f"wrong: off by {float(gap):.2g}, allowed {allowed:.2g}"
