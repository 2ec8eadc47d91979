"""How many replicas the load asks for: by rows and by bytes, whichever is scarcer."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

# share of its rows, and of its bytes, that a replica should have in use: what is left takes the
# load while another one starts
TARGET = 0.7


def by_rows_and_bytes(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Σ over replicas of max(rows / max_rows, bytes / budget) / TARGET.

    Rows that wait count: they exceed what a replica can hold, and ask for others. Ray keeps the
    number within its bounds and waits until it has lasted.
    """
    metrics = context.aggregated_metrics or {}
    rows, bytes_ = metrics.get("rows", {}), metrics.get("bytes", {})
    replicas = set(rows) | set(bytes_)
    if not replicas:
        return context.target_num_replicas, {}
    load = sum(max(rows.get(one, 0.0), bytes_.get(one, 0.0)) for one in replicas)
    # those that do not report yet are as busy as the others
    return max(1.0, load / len(replicas) * context.current_num_replicas / TARGET), {}
