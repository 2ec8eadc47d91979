"""Several models side by side: one table of all metrics, one figure, one page."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvprune.evaluate.compare.results import Entry, Result, best, entries, read_results, summary
from kvprune.utils.amounts import size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
NONE = "–"
NOTE = (
    "Perplexity and the share pruned are over all context sizes that were measured, accuracy is "
    "the mean over tasks, cache and speed are at the largest context and the fastest batch there."
)


def compare(paths: Iterable[str | Path], out: Path | None = None) -> tuple[list[Row], list[Path]]:
    """The summary of results that were written to files or folders; `out` gets it as a page.

    Written: compare.html with every table and the figure, compare.png, .svg and .json.
    """
    results = read_results(paths)
    models = entries(results)
    rows = [summary(entry, models) for entry in models]
    if out is None:
        return rows, []
    from kvprune.evaluate.compare.figure import draw
    from kvprune.utils import plot
    from kvprune.utils.files import write_atomically

    figure = draw(models, results)
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "compare.html", out / "compare.json"]
    write_atomically(files[0], page_of(results, models, figure).encode())
    write_atomically(files[1], json.dumps({"rows": rows}, indent=1, ensure_ascii=False).encode())
    return rows, [*files, *(plot.save(figure, out / "compare") if figure else [])]


def summary_table(rows: list[Row]) -> Table:
    columns = ["model", "method", "pruned", "perplexity", "accuracy", "cache per row",
               "against dense", "tokens/s", "against dense", "context × batch"]  # fmt: skip
    cells = [
        [
            row["model"],
            row["method"],
            _share(row["sparsity"]),
            _number(row["perplexity"], ".2f"),
            _share(row["accuracy"], 1),
            NONE if row["cache_bytes_a_row"] is None else size(row["cache_bytes_a_row"]),
            _times(row["cache_ratio"]),
            _number(row["tokens_per_second"], ",.0f"),
            _times(row["speed_ratio"]),
            NONE if row["context"] is None else f"{row['context']:,} × {row['batch']}",
        ]
        for row in rows
    ]
    # leave out columns without any measurement
    shown = [i for i in range(len(columns)) if i < 2 or any(line[i] != NONE for line in cells)]
    return [columns[i] for i in shown], [[line[i] for i in shown] for line in cells]


def perplexity_table(models: list[Entry]) -> Table:
    """One line per model, one column per context size: perplexity (share pruned)."""
    sizes = sorted({n for e in models for n in e.by_context if isinstance(n, int)})
    contexts: list[int | str] = [*sizes[-8:], *(["all"] if _has_all(models) else [])]
    lines = []
    for entry in models:
        cells = [entry.by_context.get(n) for n in contexts]
        shown = [
            NONE if c is None else f"{c['perplexity']:.2f} ({c['sparsity']:.0%})" for c in cells
        ]
        if any(cells):
            lines.append([entry.name, entry.method, *shown])
    return ["model", "method", *(f"{n:,}" if isinstance(n, int) else n for n in contexts)], lines


def zeroshot_table(models: list[Entry]) -> Table:
    tasks = list(dict.fromkeys(t for e in models for t in e.by_task if t != "mean"))
    lines = []
    for entry in models:
        if (mean := entry.accuracy) is not None:
            own = [entry.by_task.get(task) for task in tasks]
            cells = [NONE if row is None else _share(row["accuracy"], 1) for row in own]
            share = _share(mean["sparsity"])
            lines.append([entry.name, entry.method, *cells, _share(mean["accuracy"], 1), share])
    return ["model", "method", *tasks, "mean", "pruned"], lines


def throughput_table(result: Result) -> Table:
    lines = [
        [
            row["side"],
            row["rows"] if row.get("at") is None else f"{row['rows']} {row['at']:.0%}",
            f"{row['context']:,}",
            str(row["batch"]),
            _share(row["sparsity"]),
            f"{1000 * row['seconds_step']:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            _times(row["best_ratio"]),
            size(row["cache_bytes"]),
        ]
        for row in best(result.rows)
    ]
    return ["side", "rows", "context", "best batch", "pruned", "ms per step", "tokens/s",
            "against dense", "cache"], lines  # fmt: skip


def cost_table(result: Result) -> Table:
    lines = [
        [
            "dense" if row["method"] == "dense" else f"pruned {row['sparsity']:.0%}",
            f"{row['context']:,}",
            str(row["batch"]),
            f"{row['flops_token'] / 1e6:,.1f}",
            f"{row['flops']['attention'] / 1e6:,.1f}",
            f"{row['flops']['drop-tokens'] / 1e6:,.2f}",
            size(row["cache_bytes"]),
            _times(row["cache_ratio"]),
        ]
        for row in result.rows
    ]
    return ["", "context", "batch", "MFLOPs per token", "attention", "drop-tokens", "cache",
            "against dense"], lines  # fmt: skip


def page_of(results: list[Result], models: list[Entry], figure: Figure | None) -> str:
    """Everything as one self-contained HTML page."""
    from kvprune.utils import page, plot

    parts = []
    if models:
        parts.append(page.note(NOTE))
        parts.append(page.table(*summary_table([summary(e, models) for e in models]), left=2))
    if figure is not None:
        parts.append(page.figure(plot.inline(figure, "compare"), "against sparsity"))
    for title, table in (
        ("Perplexity by context (share pruned)", perplexity_table(models)),
        ("Zero-shot accuracy", zeroshot_table(models)),
    ):
        if table[1]:
            parts += [page.heading(title), page.table(*table, left=2)]
    for result in results:
        name = str(result.about.get("adapter") or result.about.get("model", ""))
        if result.kind == "throughput":
            parts += [page.heading(f"Throughput: {name}")]
            parts += [page.table(*throughput_table(result), left=2)]
        elif result.kind == "cost":
            parts += [page.heading(f"Cost by formula: {name}")]
            parts += [page.table(*cost_table(result))]
    parts.append(page.heading("How it was measured"))
    parts += [page.details(f"{r.kind}: {r.path.name}", r.about) for r in results]
    return page.page("kvprune: models side by side", parts)


def _has_all(models: list[Entry]) -> bool:
    return any("all" in entry.by_context for entry in models)


def _share(value: float | None, digits: int = 0) -> str:
    return NONE if value is None else f"{value:.{digits}%}"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else f"{value:{form}}"


def _times(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} ×"
