"""The result as JSON, as Markdown and as a figure."""

import json
from pathlib import Path
from typing import Any

import torch

from kvprune.evaluate.throughput.timing import machine, versions
from kvprune.utils.amounts import size
from kvprune.utils.files import write_atomically
from kvprune.utils.plot import COLOURS, MARKERS, heading, legend, level, panels, save
from on_gpu.race import Row
from on_gpu.sizes import Sizes

TITLES = {
    "launch": "What one more kernel costs",
    "decode": "One layer's decode step",
    "model": "A whole model's step of four tokens",
    "prefill": "One layer's attention of a prompt",
    "train": "One layer's attention in training, forward and backward",
    "memory": "Memory of one layer's attention in training",
}
MEANINGLESS = "**A dry run: these times mean nothing.** They show that the program runs."


def result(device: torch.device, sizes: Sizes, rows: list[Row], command: str) -> dict[str, Any]:
    about: dict[str, Any] = {**machine()}
    if device.type == "cuda":
        own = torch.cuda.get_device_properties(device)
        about |= {"gpu": own.name, "gpu_bytes": own.total_memory,
                  "cuda": torch.version.cuda, "rocm": torch.version.hip}  # fmt: skip
    return {
        "measured": "gpu", "counts": sizes.counts, "machine": about, "versions": versions(),
        "command": command, "model": sizes.model.name, "dtype": str(sizes.dtype)[6:],
        "sparsity": sizes.sparsity, "rounds": sizes.rounds, "rows": with_ratios(rows),
    }  # fmt: skip


def with_ratios(rows: list[Row]) -> list[Row]:
    """Each row with its time / that of kvprune in the same case; of ours, the first."""
    own: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["who"].startswith("kvprune") and row["seconds"]:
            own.setdefault((row["part"], row["case"]), row["seconds"])
    return [
        {**row, "ratio": row["seconds"] / own[key] if row["seconds"] and key in own else None}
        for row in rows
        for key in [(row["part"], row["case"])]
    ]


def write(found: dict[str, Any], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"gpu.json": json.dumps(found, indent=1) + "\n", "gpu.md": markdown(found) + "\n"}
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    drawn = save(draw(found), folder / "gpu", ("png",)) if timed(found) else []
    return [*(folder / name for name in files), *drawn]


def markdown(found: dict[str, Any]) -> str:
    about, numbers = found["machine"], found["versions"]
    place = about.get("gpu") or about["cpu"]
    lines = [
        f"### kvprune on {place}",
        "",
        f"`{found['command']}`: {found['model']}, {found['dtype']}, "
        f"{100 * found['sparsity']:g} % pruned, medians of {found['rounds']} rounds in turn; "
        + ", ".join(f"{name} {number}" for name, number in numbers.items()),
    ]
    if not found["counts"]:
        lines += ["", MEANINGLESS]
    for part, title in TITLES.items():
        rows = [row for row in found["rows"] if row["part"] == part]
        if rows:
            lines += ["", f"**{title}**", "", *_table(part, rows)]
    return "\n".join(lines)


def _table(part: str, rows: list[Row]) -> list[str]:
    """Cases down, contestants across."""
    names, cases = ([*dict.fromkeys(row[key] for row in rows)] for key in ("who", "case"))
    cells = {(row["case"], row["who"]): _cell(part, row) for row in rows}
    own = [[case, *(cells.get((case, name), "") for name in names)] for case in cases]
    lines = [["rows × tokens" if part != "launch" else "", *names],
             ["---", *["---:"] * len(names)], *own]  # fmt: skip
    problems = dict.fromkeys(f"{row['who']}: {row['problem']}" for row in rows if row["problem"])
    notes = ["", *(f"- {problem}" for problem in problems)] if problems else []
    return [*(f"| {' | '.join(line)} |" for line in lines), *notes]


def _cell(part: str, row: Row) -> str:
    if row["problem"]:
        return "—"
    if part == "memory":
        return "not counted" if row["bytes"] is None else size(row["bytes"])
    seconds = row["seconds"]
    shown = f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"
    return shown if row["ratio"] is None else f"{shown} ({row['ratio']:.2f} ×)"


def timed(found: dict[str, Any]) -> list[str]:
    """Parts in which something was compared."""
    return [*dict.fromkeys(row["part"] for row in found["rows"] if row["ratio"])]


def draw(found: dict[str, Any]):
    """Time / kvprune's, by case: above the line, kvprune is faster."""
    from matplotlib.ticker import NullFormatter

    parts = timed(found)
    figure, axes = panels([TITLES[part] for part in parts], width=6.2, height=3.4, columns=2)
    for axis, part in zip(axes, parts, strict=True):
        rows = [row for row in found["rows"] if row["part"] == part and row["ratio"]]
        cases, names = ([*dict.fromkeys(row[key] for row in rows)] for key in ("case", "who"))
        for number, name in enumerate(names):
            own = [row for row in rows if row["who"] == name]
            axis.plot(
                [cases.index(row["case"]) for row in own], [row["ratio"] for row in own],
                MARKERS[number % len(MARKERS)], color=COLOURS[number % len(COLOURS)], label=name,
            )  # fmt: skip
        level(axis, 1)
        axis.set(yscale="log", ylabel="time / kvprune's", xlim=(-0.5, len(cases) - 0.5))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_xticks(range(len(cases)), cases, rotation=30 if len(cases) > 4 else 0)
        legend(axis, loc="center left", bbox_to_anchor=(1, 0.5))
    heading(
        figure,
        f"{found['machine'].get('gpu') or found['machine']['cpu']}: {found['model']}, "
        f"{found['dtype']}, {100 * found['sparsity']:g} % pruned"
        + ("" if found["counts"] else "; a dry run, whose times mean nothing"),
    )
    return figure
