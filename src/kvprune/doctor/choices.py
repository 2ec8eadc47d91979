"""Which backend each operation will use, and why not a faster one."""

from __future__ import annotations

from typing import Any

import torch

from kvprune.doctor.operations import ENTRIES, Entry, name_of
from kvprune.doctor.report import Choice
from kvprune.ops.dispatch import BACKENDS, REFERENCE, Operation, devices, installed
from kvprune.ops.hard import HARD_ATTENTION


def choices(device: torch.device) -> list[Choice]:
    """One for each operation, or several where it depends on the dtype."""
    return [choice for entry in ENTRIES for choice in _of_operation(entry, device)]


def chosen(
    operation: Operation[Any, Any], dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """The backend, and why no faster one."""
    x = torch.empty(0, dtype=dtype, device=device)
    name = operation.best_backend(x)
    if operation is HARD_ATTENTION and name == "cpu":
        from kvprune.ops.hard.tile import has_bfloat16_products

        if not has_bfloat16_products():
            return REFERENCE, "this CPU has no products of bfloat16"
    return name, "" if name != REFERENCE else why_not(operation, x)


def why_not(operation: Operation[Any, Any], x: torch.Tensor) -> str:
    """Why tensors like x are left to plain torch."""
    written = [name for name in operation.dtypes if x.device.type in devices(name)]
    if not written:
        return f"no kernel for {x.device.type}"
    reasons = []
    for name in written:
        taken = ", ".join(map(name_of, operation.dtypes[name]))
        if not installed(name):
            reasons.append(f"{BACKENDS[name].package} is not installed")
        elif x.dtype not in operation.dtypes[name]:
            reasons.append(f"{name} takes {taken}")
        elif BACKENDS[name].device != x.device.type:
            reasons.append(f"{name} runs here in its interpreter only")
        else:
            reasons.append(operation.refusal(name, x) or "")
    return "; ".join(reasons)


def _of_operation(entry: Entry, device: torch.device) -> list[Choice]:
    groups: dict[tuple[str, str], list[str]] = {}
    for dtype in entry.dtypes:
        key = chosen(entry.operation, dtype, device)
        groups.setdefault(key, []).append(name_of(dtype))
    return [
        Choice(entry.operation.name, entry.used_for, tuple(dtypes), backend, why)
        for (backend, why), dtypes in groups.items()
    ]
