"""What every benchmark shares: fair timing, the machine's name, one table or one JSON object."""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ["kvprune", "torch", "transformers", "numba"]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has; a script may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="the same ratios from less work")
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.add_argument("--save", action="store_true", help="keep the object in benchmarks/results")
    return parser


def interleave(
    repeats: int, calls: dict[str, Callable[[], object]], warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each call, round robin: what slows the machine down slows all of them down."""
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


def ratio(slow: list[float], fast: list[float]) -> float:
    """The median over rounds of slow / fast; both of a pair were measured in the same moment."""
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def child(*arguments: str) -> float:
    """A number that the running script prints when called with these, in a process of its own."""
    # every tensor a mapping of its own, given back when freed: no holes in a count of memory
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, sys.argv[0], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return float(done.stdout)


def forget_peak() -> None:
    """Start a new high-water mark of this process's memory."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> float:
    """Bytes of this process in memory now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def machine() -> dict[str, str | int]:
    """The CPU's name and what we may use of it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((l.split(":")[1].strip() for l in lines if l.startswith("model name")), name)
    return {"cpu": name, "cores": os.cpu_count() or 1, "system": platform.system()}


def versions() -> dict[str, str]:
    """Python and the packages that decide how fast it is; a missing one is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def report(
    args: argparse.Namespace,
    ratios: dict[str, float],
    columns: list[str],
    rows: list[list[object]],
    details: dict[str, object] | None = None,
) -> None:
    """Print the table, or with --json the object; with --save, keep the object as well."""
    script = Path(sys.argv[0])
    command = shlex.join(["python", f"benchmarks/{script.name}", *sys.argv[1:]])
    result = {
        "ratios": {name: round(value, 3) for name, value in ratios.items()},
        "machine": machine(),
        "versions": versions(),
        "command": command,
        "details": details or {},
    }
    if args.save:
        save(result, RESULTS / f"{script.stem}.json")
    if args.json:
        print(json.dumps(result))
    else:
        show(result, columns, rows)


def save(result: dict[str, object], path: Path) -> None:
    """Write beside the target and rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(result, indent=2) + "\n")
    draft.replace(path)


def show(result: dict, columns: list[str], rows: list[list[object]]) -> None:
    """The same for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"$ {result['command']}", highlight=False, soft_wrap=True)
    console.print(
        "{cpu}, {cores} cores, {system}".format(**result["machine"]),
        highlight=False,
        soft_wrap=True,
    )
    packages = [f"{name} {number}" for name, number in result["versions"].items()]
    console.print(", ".join(packages), highlight=False, soft_wrap=True)
    table = Table(*columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row))
    console.print(table)
    for name, value in result["ratios"].items():
        console.print(f"{name}  {value:.4g}", highlight=False, soft_wrap=True)
