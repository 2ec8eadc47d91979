"""Check that the dashboard and the alerts in deploy/ name only what /metrics serves.

Metrics, their labels in matchers and in by (...), and the functions of each expression. The names
come from the text that a server without a model writes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvprune.serve.metrics import FINISHES, Metrics

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "deploy/dashboard.json", ROOT / "deploy/alerts.yaml")
# added by Prometheus when it scrapes; `replica` by a server of several replicas
SCRAPED = {"job", "instance", "replica"}
OWN = {"up": set[str]()}  # metrics that Prometheus makes itself
AGGREGATIONS = {"sum", "avg", "min", "max", "count", "quantile", "topk", "bottomk", "stddev"}
FUNCTIONS = AGGREGATIONS | {
    "rate", "irate", "increase", "histogram_quantile", "avg_over_time", "max_over_time",
    "min_over_time", "sum_over_time", "label_values", "clamp_min", "absent", "abs",
}  # fmt: skip
GROUPINGS = {"by", "without", "on", "ignoring", "group_left", "group_right"}
WORDS = {"and", "or", "unless", "offset", "bool"}
TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[\w$:]+\])|(?P<name>[a-zA-Z_:][\w:]*)"""
    r"""|(?P<number>[\d.]+(?:e[+-]?\d+)?\w*)|(?P<mark>=~|!~|!=|==|<=|>=|[-+*/%^<>=(){},])"""
)


def served() -> dict[str, set[str]]:
    """The labels of every sample that /metrics writes, by its name."""
    counters = {f"requests_{finish}": 1 for finish in FINISHES} | {"dropped_by_layer": (1, 2)}
    status = SimpleNamespace(
        rows=(), bytes=1, budget=2, prefix_bytes=0, kept_by_layer=(1, 2), counters=counters
    )
    engine: Any = SimpleNamespace(
        name="model", models=("model",), alive=True, status=lambda: status
    )
    metrics = Metrics(engine)
    metrics.answered(200)
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            names.setdefault(sample.name, set()).update(sample.labels)
    return names


@dataclass
class Named:
    """What an expression names."""

    metrics: dict[str, set[str]] = field(default_factory=dict)  # with the labels of their matchers
    grouped: set[str] = field(default_factory=set)  # labels in by (...) and the like
    functions: set[str] = field(default_factory=set)


def parse(expression: str) -> Named:
    """Names by kind; an error for what is no token, or a bracket without its other half."""
    tokens = _tokens(expression)
    named, depth, at = Named(), 0, 0
    while at < len(tokens):
        kind, text = tokens[at]
        follows = tokens[at + 1][1] if at + 1 < len(tokens) else ""
        depth += {"(": 1, ")": -1}.get(text, 0)
        if depth < 0 or text in "{}":
            raise ValueError(f"{text} has no other half")
        if text in GROUPINGS and follows == "(":
            labels, at = _until(tokens, at + 2, ")")
            named.grouped.update(name for name in labels if name != ",")
        elif text == "label_values":
            # its last argument is a label, as no metric is one
            close = len(tokens) - 1
            named.grouped.add(tokens[close - 1][1])
            tokens = [*tokens[: close - 2], tokens[close]]
        elif kind == "name" and (follows == "(" or (follows in GROUPINGS and text in AGGREGATIONS)):
            named.functions.add(text)
        elif kind == "name" and text not in WORDS | GROUPINGS:
            labels = named.metrics.setdefault(text, set())
            if follows == "{":
                inside, at = _until(tokens, at + 2, "}")
                labels.update(_matched(inside))
        at += 1
    if depth:
        raise ValueError("a ( has no other half")
    return named


def _tokens(expression: str) -> list[tuple[str, str]]:
    tokens, at = [], 0
    while at < len(expression):
        found = TOKEN.match(expression, at)
        if found is None and not expression[at].isspace():
            raise ValueError(f"{expression[at:][:20]!r} is no part of an expression")
        if found is None:
            at += 1
            continue
        tokens.append((str(found.lastgroup), found.group()))
        at = found.end()
    return tokens


def _until(tokens: list[tuple[str, str]], at: int, end: str) -> tuple[list[str], int]:
    """The texts up to `end`, and where that is."""
    inside = []
    while at < len(tokens) and tokens[at][1] != end:
        inside.append(tokens[at][1])
        at += 1
    if at == len(tokens):
        raise ValueError(f"a {end} is missing")
    return inside, at


def _matched(inside: list[str]) -> Iterator[str]:
    """The labels of `name="value", other=~"pattern"`."""
    for start in range(0, len(inside), 4):
        label, operator, value, comma = [*inside[start : start + 4], ",", "", ""][:4]
        if operator not in ("=", "!=", "=~", "!~") or value[:1] != '"' or comma != ",":
            raise ValueError(f"{' '.join(inside)} are no matchers")
        if operator in ("=~", "!~"):
            re.compile(value[1:-1].replace("$", ""))
        yield label


def expressions(file: Path) -> Iterator[tuple[str, str]]:
    """(where, expression) of a dashboard's panels and variables, or of alerts."""
    if file.suffix == ".json":
        board = json.loads(file.read_text(encoding="utf-8"))
        for panel in board["panels"]:
            for target in panel["targets"]:
                yield f"{file.name}, {panel['title']}", target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                yield f"{file.name}, variable {variable['name']}", variable["query"]
        return
    for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield f"{file.name}, {rule['alert']}", rule["expr"]


def problems(expression: str, names: dict[str, set[str]]) -> Iterator[str]:
    """What is wrong with an expression."""
    try:
        named = parse(expression)
    except ValueError as error:
        yield str(error)
        return
    known = SCRAPED.union(*(names.get(metric, OWN.get(metric, set())) for metric in named.metrics))
    for metric, labels in named.metrics.items():
        if metric not in names and metric not in OWN:
            yield f"{metric} is not served"
            continue
        for label in sorted(labels - SCRAPED - names.get(metric, set())):
            yield f"{metric} has no label {label}"
    yield from (f"no metric has the label {label}" for label in sorted(named.grouped - known))
    yield from (f"{name} is no function" for name in sorted(named.functions - FUNCTIONS))
    if "histogram_quantile" in named.functions and "le" not in named.grouped:
        yield "histogram_quantile needs le in by (...)"
    if not named.metrics:
        yield "it names no metric"


def main() -> None:
    names, wrong, count = served(), [], 0
    for file in map(Path, sys.argv[1:]) if sys.argv[1:] else FILES:
        for where, expression in expressions(file):
            count += 1
            wrong += [f"{where}: {problem}" for problem in problems(expression, names)]
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{count} expressions name only what is served")


if __name__ == "__main__":
    main()
