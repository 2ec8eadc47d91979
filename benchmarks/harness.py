"""Shared by all benchmarks: flags, memory, one table or one JSON object."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from kvprune.evaluate.throughput.timing import interleave, machine, ratio, versions

__all__ = ["arguments", "child", "forget_peak", "interleave", "printed", "ratio", "report",
           "resident"]  # fmt: skip
RESULTS = Path(__file__).parent / "results"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The flags that every benchmark has; a script may add its own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--sizes", choices=["quick", "bench", "full"], default="full",
        help="how much work: a quick look, that of `make bench`, or everything",
    )  # fmt: skip
    parser.add_argument(
        "--quick", dest="sizes", action="store_const", const="quick", help="--sizes quick"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")
    parser.add_argument(
        "--save", action="store_true", help="save the object in benchmarks/results/SIZES"
    )
    return parser


def child(*arguments: str) -> float:
    """The number that the running script prints when called with these, in a new process."""
    # every tensor is its own mapping, returned when freed: no holes in a count of memory
    return float(printed(*arguments, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}))


def printed(*arguments: str, env: dict[str, str]) -> str:
    """The output of the running script when called with these, in a new process."""
    command = [sys.executable, sys.argv[0], *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout


def forget_peak() -> None:
    """Start a new high-water mark of this process's memory."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(field: str) -> float:
    """Bytes of this process in memory now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def report(
    args: argparse.Namespace,
    ratios: dict[str, float],
    columns: list[str],
    rows: list[list[object]],
    details: dict[str, object] | None = None,
) -> None:
    """Print the table, or with --json the object; with --save, also save the object."""
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
        save(result, RESULTS / args.sizes / f"{script.stem}.json")
    if args.json:
        print(json.dumps(result))
    else:
        show(result, columns, rows)


def save(result: dict[str, object], path: Path) -> None:
    """Write to a temporary file and rename: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(result, indent=2) + "\n")
    draft.replace(path)


def show(result: dict, columns: list[str], rows: list[list[object]]) -> None:
    """Print it as a table."""
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
