"""/metrics for Prometheus: vLLM's names with our prefix, so that dashboards carry over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvprune.serve.request import RowStatus, Status
from kvprune.serve.seam import ServingEngine
from kvprune.version import __version__

PREFIX = "kvprune:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a choice.", SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", SECONDS),
    "request_queue_time_seconds": ("Before a request was admitted.", SECONDS),
    "request_prefill_time_seconds": ("From admission to the first token.", SECONDS),
    "request_decode_time_seconds": ("From the first token to the last.", SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", TOKENS),
    "request_generation_tokens": ("New tokens of a request.", TOKENS),
}
COUNTERS_BY_MODEL = {
    "num_preemptions": ("preemptions", "Rows that were put aside for lack of bytes."),
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts that were read."),
    "generation_tokens": ("generation_tokens", "Tokens that were generated."),
    "prefix_cache_queries": ("prefix_queries", "Prompts that were looked up among the prefixes."),
    "prefix_cache_hits": ("prefix_hits", "Prompts that began with a kept prefix."),
    "prefix_cache_hit_tokens": ("prefix_hit_tokens", "Tokens that were not read again."),
}
COUNTERS = {
    "kv_slots_seen": ("seen_slots", "Slots of all layers that were ever written."),
    "snapshot_store_queries": ("stored_queries", "Prompts that were looked up in --snapshots."),
    "snapshot_store_hits": ("stored_hits", "Prompts that went on from a snapshot found there."),
    "snapshot_store_writes": ("stored_writes", "Snapshots that were written there."),
    "snapshot_store_failures": ("stored_failures", "Reads and writes that failed."),
    "snapshot_store_left_out": ("stored_left_out", "Not written: too much waited already."),
    "engine_steps": ("steps", "Steps of the engine."),
    "requests_admitted": ("admitted", "Rows that were admitted."),
}
FINISHES = ("stop", "length", "cancelled", "error")


class Metrics:
    """The histograms of one server, and what its engine counts."""

    def __init__(self, engine: ServingEngine):
        self._registry = CollectorRegistry()
        self._histograms = {
            name: Histogram(
                PREFIX + name, help, ["model"], buckets=buckets, registry=self._registry
            )
            for name, (help, buckets) in HISTOGRAMS.items()
        }
        self._first = engine.name
        for histogram in self._histograms.values():
            for model in engine.models:
                histogram.labels(model)  # from the start, with a count of 0
        self._responses = Counter(
            f"{PREFIX}http_responses", "Answers by status.", ["status"], registry=self._registry
        )
        self._registry.register(_EngineCollector(engine))

    def observe(self, name: str, value: float, model: str = "") -> None:
        self._histograms[name].labels(model or self._first).observe(value)

    def answered(self, status: int) -> None:
        self._responses.labels(str(status)).inc()

    def families(self) -> tuple[Metric, ...]:
        """As values, that can be sent to another process."""
        return tuple(self._registry.collect())

    def text(self) -> bytes:
        return bytes(generate_latest(self._registry))


class _EngineCollector(Collector):
    """What the engine last published, read when it is asked for."""

    def __init__(self, engine: ServingEngine):
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        return ()  # or registering would read the engine

    def collect(self) -> Iterator[Metric]:
        status = self._engine.status()
        counters = status.counters
        gauges = {
            "engine_alive": (int(self._engine.alive), "1 while the engine's thread runs."),
            "kv_cache_usage_perc": (
                status.bytes / status.budget if status.budget else 0.0,
                "Share of the budget in use, 0 to 1.",
            ),
            "kv_bytes_used": (status.bytes, "Bytes that the caches take."),
            "kv_bytes_budget": (status.budget, "Bytes that they may take."),
            "kv_bytes_peak": (counters.get("peak_bytes", status.bytes), "The most they took."),
            "snapshots_bytes": (status.prefix_bytes, "Bytes of kept prefixes."),
            "admission_forecast_error": (
                counters.get("forecast_error", 0.0),
                "Of the last row that ended: forecast / true bytes - 1.",
            ),
        }
        for name, (value, text) in gauges.items():
            yield GaugeMetricFamily(PREFIX + name, text, value=float(value))
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(PREFIX + name, text, value=float(counters.get(key, 0)))
        yield from self._by_model(status)
        yield self._by_label(
            GaugeMetricFamily(f"{PREFIX}kv_slots_live", "Tokens held, all rows.", labels=["layer"]),
            dict(enumerate(status.kept_by_layer)),
        )
        yield self._by_label(
            CounterMetricFamily(f"{PREFIX}tokens_dropped", "Tokens dropped.", labels=["layer"]),
            dict(enumerate(counters.get("dropped_by_layer", ()))),
        )
        yield self._by_label(
            GaugeMetricFamily(f"{PREFIX}info", "The server.", labels=["model", "version"]),
            {(model, __version__): 1 for model in self._engine.models},
        )

    def _by_model(self, status: Status) -> Iterator[Metric]:
        """What rows do, for each model that is served."""
        first = self._engine.name
        counted = status.counters.get("by_model", {first: status.counters})
        rows = {model: list[RowStatus]() for model in self._engine.models}
        for row in status.rows:
            rows[row.model or first].append(row)
        running = {m: sum(row.state == "running" for row in own) for m, own in rows.items()}
        gauges: dict[str, tuple[Mapping[str, float], str]] = {
            "num_requests_running": (running, "Rows in the batch."),
            "num_requests_waiting": (
                {model: len(own) - running[model] for model, own in rows.items()},
                "Rows that wait or were put aside.",
            ),
            "keep_rate": (
                {model: _keep_rate(own) for model, own in rows.items()},
                "Share of tokens read that is held.",
            ),
        }
        for name, (values, text) in gauges.items():
            yield self._by_label(GaugeMetricFamily(PREFIX + name, text, labels=["model"]), values)
        for name, (key, text) in COUNTERS_BY_MODEL.items():
            values = {model: own.get(key, 0) for model, own in counted.items()}
            yield self._by_label(CounterMetricFamily(PREFIX + name, text, labels=["model"]), values)
        yield self._by_label(
            CounterMetricFamily(
                f"{PREFIX}request_success",
                "Requests by how they ended.",
                labels=["finished_reason", "model"],
            ),
            {
                (finish, model): own.get(f"requests_{finish}", 0)
                for model, own in counted.items()
                for finish in FINISHES
            },
        )

    @staticmethod
    def _by_label(family: Metric, values: Mapping[Any, float]) -> Metric:
        for label, value in values.items():
            labels = label if isinstance(label, tuple) else (label,)
            family.add_metric([str(part) for part in labels], float(value))  # type: ignore[attr-defined]
        return family


def _keep_rate(rows: Sequence[RowStatus]) -> float:
    read = sum(row.read for row in rows)
    return sum(row.kept for row in rows) / read if read else 1.0
