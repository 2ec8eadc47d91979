"""Read the results of kvprune eval, grouped by model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvprune.errors import PruneError

Row = dict[str, Any]
# the names in a row show what was measured; LAMBADA has a perplexity in addition to its accuracy
KINDS = {"accuracy": "zeroshot", "perplexity": "perplexity", "flops": "cost",
         "tokens_per_second": "throughput"}  # fmt: skip
ALL = "all"  # the row over every context size, or every task


@dataclass(frozen=True)
class Result:
    """One file of rows, all of one kind, and how they were measured."""

    path: Path
    kind: str
    about: Row
    rows: list[Row]


@dataclass
class Entry:
    """One model as it was measured: dense, or with one adapter or baseline."""

    name: str
    method: str
    base: str
    by_context: dict[int | str, Row] = field(default_factory=dict)
    by_task: dict[str, Row] = field(default_factory=dict)
    speeds: list[Row] = field(default_factory=list)

    @property
    def overall(self) -> Row | None:
        """Perplexity and sparsity over all contexts, or else at the largest."""
        sizes = [size for size in self.by_context if isinstance(size, int)]
        if ALL in self.by_context:
            return self.by_context[ALL]
        return self.by_context[max(sizes)] if sizes else None

    @property
    def accuracy(self) -> Row | None:
        """The mean over tasks; their own "mean" row is not one of them."""
        rows = [row for task, row in self.by_task.items() if task != "mean"]
        if not rows:
            return None
        names = ("accuracy", "sparsity")
        return {name: sum(row[name] for row in rows) / len(rows) for name in names}

    @property
    def speed(self) -> Row | None:
        """At the largest context, the batch with the most tokens/s."""
        key = lambda row: (row["context"], row["tokens_per_second"])  # noqa: E731
        return max(self.speeds, key=key, default=None)


def read_results(paths: Iterable[str | Path]) -> list[Result]:
    """The results in files and, recursively, in folders; a given file must hold some."""
    results: list[Result] = []
    for path in map(Path, paths):
        if not path.exists():
            raise PruneError(f"{path} does not exist; pass folders or files of kvprune eval --out")
        if path.is_dir():
            # unfinished sweeps are in .points.json
            files = [f for f in sorted(path.rglob("*.json")) if ".points." not in f.name]
            inside = [result for file in files if (result := _read(file)) is not None]
            if not inside:
                raise PruneError(f"{path} holds no results of kvprune eval; pass its --out folder")
            results += inside
        else:
            result = _read(path)
            if result is None:
                raise PruneError(f"{path} holds no results of kvprune eval")
            results.append(result)
    # given a folder and a file in it, read the file once
    return list({result.path.resolve(): result for result in results}.values())


def _read(file: Path) -> Result | None:
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        about = saved["about"]
        rows = saved["rows"] if "rows" in saved else [r for p in saved["points"] for r in p["rows"]]
        kind = next((kind for name, kind in KINDS.items() if name in rows[0]), None)
    except (ValueError, KeyError, TypeError, IndexError):
        return None
    return None if kind is None or not isinstance(about, dict) else Result(file, kind, about, rows)


def entries(results: list[Result]) -> list[Entry]:
    """One entry per model and adapter; dense numbers have their own."""
    by_model: dict[tuple[str, str | None], Entry] = {}

    def entry(about: Row, dense: bool) -> Entry:
        model, adapter = str(about.get("model", "?")), about.get("adapter")
        own = about.get("method") or {}
        method = str(own.get("method", "pruning") if adapter or own else "dense")
        if dense and method != "dense":
            # the dense model of a fully fine-tuned one has no name of its own
            adapter, method = (None if adapter else "dense"), "dense"
        key = (model, adapter)
        if key not in by_model:
            name = model if adapter in (None, "dense") else str(adapter)
            by_model[key] = Entry(name, method, model)
        return by_model[key]

    for result in results:
        for row in result.rows:
            if result.kind == "perplexity":
                entry(result.about, dense=False).by_context[row["context"]] = row
                if row.get("dense_perplexity") is not None:
                    plain = {"context": row["context"], "sparsity": 0.0}
                    plain["perplexity"] = row["dense_perplexity"]
                    entry(result.about, dense=True).by_context.setdefault(row["context"], plain)
            elif result.kind == "zeroshot":
                entry(result.about, dense=False).by_task[row["task"]] = row
            elif result.kind == "throughput" and row["side"] == "dense":
                entry(result.about, dense=True).speeds.append(row)
            elif result.kind == "throughput" and _is_own(row):
                entry(_with_method(result.about, row), dense=False).speeds.append(row)
    _shorten(list(by_model.values()))
    return sorted(by_model.values(), key=_order)


def _order(entry: Entry) -> tuple[Any, ...]:
    """Sort key: by base, the dense model first, then by method and sparsity."""
    measured = entry.overall or entry.accuracy or entry.speed or {}
    dense = entry.method == "dense"
    return entry.base, not dense, entry.method, measured.get("sparsity", 0.0), entry.name


def summary(entry: Entry, models: list[Entry]) -> Row:
    """One line of the table; what was not measured is None."""
    overall, accuracy, speed = entry.overall or {}, entry.accuracy or {}, entry.speed or {}
    same = [e for e in models if e.base == entry.base and e.method == "dense"]
    dense = _timed_with(same[0].speeds, speed) if same and speed else None
    share = overall.get("sparsity", accuracy.get("sparsity", speed.get("sparsity")))
    return {
        "model": entry.name,
        "method": entry.method,
        "sparsity": share,
        "perplexity": overall.get("perplexity"),
        "accuracy": accuracy.get("accuracy"),
        "cache_bytes_a_row": speed["cache_bytes"] / speed["batch"] if speed else None,
        "cache_ratio": speed["cache_bytes"] / dense["cache_bytes"] if dense else None,
        "tokens_per_second": speed.get("tokens_per_second"),
        "speed_ratio": speed.get("ratio"),
        "context": speed.get("context"),
        "batch": speed.get("batch"),
    }


def _timed_with(dense: list[Row], speed: Row) -> Row | None:
    """The dense row that was timed in turn with this one."""
    same = ("context", "batch", "rows")
    return next((row for row in dense if all(row[n] == speed[n] for n in same)), None)


def best(rows: list[Row]) -> list[Row]:
    """Each side at its fastest batch; `best_ratio`: to dense at its own fastest batch."""
    fastest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = (row["rows"], row.get("at"), row["context"], row["side"])
        if key not in fastest or row["tokens_per_second"] > fastest[key]["tokens_per_second"]:
            fastest[key] = row
    rows_with_ratio = []
    for key, row in fastest.items():
        dense = fastest.get((*key[:-1], "dense"))
        share = row["tokens_per_second"] / dense["tokens_per_second"] if dense else None
        rows_with_ratio.append({**row, "best_ratio": share})
    return rows_with_ratio


def _with_method(about: Row, row: Row) -> Row:
    return {**about, "method": about.get("method") or {"method": row["method"]}}


def _is_own(row: Row) -> bool:
    """Whether a row of throughput is of the model's own decisions."""
    return bool(row["rows"] == "realistic" and row["method"] != "dense")


def _shorten(models: list[Entry]) -> None:
    """Shorten paths to the last parts that tell the entries apart."""
    for names in ("name", "base"):
        full = {getattr(entry, names) for entry in models}
        for entry in models:
            parts = Path(getattr(entry, names)).parts
            for count in range(1, len(parts) + 1):
                short = "/".join(parts[-count:])
                if sum("/".join(Path(other).parts[-count:]) == short for other in full) == 1:
                    setattr(entry, names, short)
                    break
