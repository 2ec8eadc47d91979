"""How fast the memory is, and how much of that decoding reaches."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvprune.cache.arena import Arena
from kvprune.cache.extents import ExtentTable
from kvprune.doctor.report import Speed
from kvprune.ops.decode import NewToken, Votes, decode
from kvprune.ops.form import AttentionForm

ROWS, HEADS, GROUP, SIZE, RANK = 8, 8, 4, 64, 64
# tokens of a row, and bytes that are copied and read: more than caches hold
TOKENS, BLOCK = 4096, 2**28
ROUNDS = 5
# calls between two waits for a GPU: one alone would take as long as its launch
CALLS = 20


def speeds(device: torch.device) -> list[Speed]:
    """Copy, read, and decoding with nothing dropped; the best of a few rounds, taken in turn."""
    source = torch.ones(BLOCK // 4, device=device)
    target = torch.empty_like(source)
    # the first call writes every page; twice the bytes: read and written
    calls: dict[str, tuple[Callable[[], object], float]] = {
        "copy": (lambda: target.copy_(source), 2.0 * BLOCK),
        "read": (lambda: source.sum(), float(BLOCK)),
    }
    for name, dtype, kv in (
        ("float32", torch.float32, None),
        ("bfloat16", torch.bfloat16, None),
        ("int8", torch.bfloat16, "int8"),
    ):
        calls[f"decode, {name}"] = _decoding(device, dtype, kv)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(1 + ROUNDS):
        for name, (call, _) in calls.items():
            seconds[name].append(_timed(call, device))
    # the first round compiles
    found = {name: moved / min(seconds[name][1:]) for name, (_, moved) in calls.items()}
    best = max(found["copy"], found["read"])
    return [
        Speed(name, value, value / best if name.startswith("decode") else None)
        for name, value in found.items()
    ]


def _decoding(
    device: torch.device, dtype: torch.dtype, kv: str | None
) -> tuple[Callable[[], object], float]:
    """A step of one layer, and the bytes that it must read."""
    table = ExtentTable(
        ROWS, HEADS, SIZE, rank=RANK, dtype=dtype, kv=kv, arena=Arena(device, shared=False)
    )

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    token = torch.arange(TOKENS, device=device).expand(ROWS, -1)
    key = draw(ROWS, HEADS, TOKENS, SIZE)
    table.push(key, key, draw(ROWS, TOKENS, RANK), token)
    new = NewToken(
        draw(ROWS, HEADS * GROUP, 1, SIZE), draw(ROWS, HEADS, 1, SIZE),
        draw(ROWS, HEADS, 1, SIZE), torch.full((ROWS,), TOKENS, device=device),
    )  # fmt: skip
    beta = torch.tensor(1e6, device=device)  # nobody is voted out
    votes = Votes(draw(ROWS, RANK), draw(ROWS, RANK), beta)
    form = AttentionForm(SIZE**-0.5)
    return lambda: decode(table, new, form, votes=votes), float(ROWS * TOKENS * table.slot_nbytes)


def _timed(call: Callable[[], object], device: torch.device) -> float:
    calls = 1 if device.type == "cpu" else CALLS
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
