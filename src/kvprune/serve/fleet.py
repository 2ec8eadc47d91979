"""What one replica of several tells of all of them: states, metrics, health."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from prometheus_client import generate_latest
from prometheus_client.core import Metric

from kvprune.serve.request import Status

STALE_SECONDS = 5.0  # a replica that was silent for longer is taken for dead
# counters that say something of one engine alone: neither their sum nor their mean is a number
# of the whole
OWN_COUNTERS = ("forecast_error",)


@dataclass(frozen=True)
class Report:
    """What a replica last said of itself."""

    replica: str
    alive: bool
    failure: str  # why it is not alive
    pid: int
    threads: int
    state: dict[str, Any]  # of the live view
    metrics: tuple[Metric, ...] = ()
    age: float = 0.0  # seconds

    @property
    def well(self) -> bool:
        return self.alive and self.age < STALE_SECONDS


class Fleet(Protocol):
    """The replicas behind one address, seen from one of them."""

    @property
    def replica(self) -> str: ...
    async def reports(self, metrics: bool = False) -> list[Report]: ...


def state_of(status: Status) -> dict[str, Any]:
    """A state of an engine as JSON."""
    rows = [asdict(row) for row in status.rows]
    own = {name: value for name, value in vars(status).items() if name != "rows"}
    return {**own, "rows": rows, "counters": dict(status.counters)}


def whole_state(reports: Sequence[Report]) -> dict[str, Any]:
    """The states of all replicas that live, as if one engine had all the rows and all the bytes."""
    states = [report.state for report in reports if report.well]
    whole: dict[str, Any] = {
        name: sum(state[name] for state in states)
        for name in ("step", "bytes", "budget", "prefix_bytes")
    }
    whole["kept_by_layer"] = _sum([list(state["kept_by_layer"]) for state in states]) or []
    whole["counters"] = {
        name: _sum([s["counters"][name] for s in states if name in s["counters"]])
        for name in dict.fromkeys(name for state in states for name in state["counters"])
        if name not in OWN_COUNTERS
    }
    return {**whole, "rows": rows_of(reports)}


def rows_of(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The rows of all replicas that live; each says whose it is."""
    return [
        {**row, "replica": report.replica}
        for report in reports
        if report.well
        for row in report.state["rows"]
    ]


def _sum(values: Sequence[Any]) -> Any:
    """Of numbers, or of lists or mappings of them, place by place; an engine that never ran has a
    short list."""
    if values and isinstance(values[0], Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _sum([value[name] for value in values if name in value]) for name in names}
    if not values or not isinstance(values[0], list | tuple):
        return sum(values)
    longest = max(len(value) for value in values)
    return [sum(value[i] for value in values if i < len(value)) for i in range(longest)]


def fleet_health(reports: Sequence[Report]) -> tuple[int, dict[str, Any]]:
    """Status and body: 200 as long as somebody can answer."""
    replicas = [
        {"replica": report.replica, "alive": report.well, "failure": report.failure,
         "pid": report.pid, "threads": report.threads, "seconds_ago": round(report.age, 1)}
        for report in reports
    ]  # fmt: skip
    well = sum(report.well for report in reports)
    word = "ok" if well == len(reports) else "degraded" if well else "down"
    return (200 if well else 503), {"status": word, "replicas": replicas}


def whole_metrics(reports: Sequence[Report]) -> bytes:
    """Every sample of every replica that lives, with its name as a label."""
    return bytes(generate_latest(_Registry(reports)))


class _Registry:
    """All that prometheus_client asks of a registry that it is to print."""

    def __init__(self, reports: Iterable[Report]):
        self._reports = [report for report in reports if report.well]

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for report in self._reports:
            for metric in report.metrics:
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                family.samples += [
                    sample._replace(labels={"replica": report.replica, **sample.labels})
                    for sample in metric.samples
                ]
        yield from families.values()
