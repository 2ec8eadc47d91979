"""The gate inside Triton's kernels: two instructions, or four numbers of a table that caches hold.

A gate is one pointer to float32 numbers: a header, then cubics, the table of `table.py` with its
cells scaled to a width of 1. A new α is new numbers, not a new kernel. Per element a table costs 16
bytes from the second-level cache and about 25 FLOPs, the logistic gate two transcendentals and no
bytes; the elementwise kernels of this file, which exist to be tested, are bound by memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from kvprune.ops.alpha_sigmoid.reference import check_alpha, check_temperature
from kvprune.ops.alpha_sigmoid.table import FRACTION_BITS, GateTable, alpha_table
from kvprune.ops.gate import Gate
from kvprune.ops.gpu import FUSION, Block, cdiv, jit, on_its_device

HEADER = tl.constexpr(8)
ELEMENTS = 512
# float32 beside float64: the fraction is shorter, and the exponent starts elsewhere
SHIFT = tl.constexpr(23 - (52 - FRACTION_BITS))
REBASED = (1023 - 127) << (52 - FRACTION_BITS)
CELL = tl.constexpr(-(1 << (23 - (52 - FRACTION_BITS))))
# reciprocal of a cell's width from the exponent of its left end: 2·127 and the 6 bits of its number
WIDTHS = tl.constexpr(2 * 127 + 52 - FRACTION_BITS)
LARGEST = tl.constexpr(float(np.finfo(np.float32).max))
# α − 1 from which the gate is a step: only an x of 0 would not saturate
STEEP = 2.0**60
# α − 1 until which it is the logistic sigmoid: numbers of the table would be no normal float32
FLAT = 2.0**-60


class DeviceGate(NamedTuple):
    """What a kernel is given: numbers, and which formula they are for."""

    numbers: Tensor
    kind: str  # "logistic", "table" or "step"


def device_gate(gate: Gate, device: torch.device, log: bool = True) -> DeviceGate:
    """A gate, or its log, for kernels on this device."""
    return _device_gate(gate.kind, float(gate.alpha), device, log)


@functools.lru_cache(maxsize=8)
def _device_gate(kind: str, alpha: float, device: torch.device, log: bool) -> DeviceGate:
    if kind == "temperature":
        return _formula("logistic", 1 / check_temperature(1 / alpha), device)
    a = check_alpha(alpha) - 1
    if not FLAT < a < STEEP:
        return _formula("logistic" if a <= FLAT else "step", 1.0, device)
    table = alpha_table(alpha)
    numbers = np.concatenate([_header(table), _unit_cells(table, log).ravel()]).astype(np.float32)
    return DeviceGate(torch.from_numpy(numbers).to(device), "table")


def _formula(kind: str, scale: float, device: torch.device) -> DeviceGate:
    return DeviceGate(torch.tensor([scale], dtype=torch.float32, device=device), kind)


def _header(table: GateTable) -> list[float]:
    high = float(np.float32(table.scale))
    rows = _zero_row(table)
    first_z, first_y = table.first_z - REBASED, table.first_y - REBASED
    return [high, table.scale - high, table.tail, table.half, first_z, first_y, rows, 2 / high]


def _zero_row(table: GateTable) -> int:
    """The row of x = 0: that of y = `tail`."""
    return (int(np.float64(table.tail).view(np.int64)) >> FRACTION_BITS) - table.first_y


def _unit_cells(table: GateTable, log: bool) -> Any:
    """Cubics in the share of the cell: those in the distance would overflow float32."""
    row = np.arange(table.half)
    top = row + np.where(row < _zero_row(table), table.first_z, table.first_y)
    width = 2.0 ** ((top >> (52 - FRACTION_BITS)) - 1023.0 - (52 - FRACTION_BITS))
    cells = (table.log_cells if log else table.gate_cells).reshape(2, -1, 4)
    cells = cells * width[:, None] ** np.arange(4)
    # only x = 0 reaches a cell as steep as that, and it is at the left end: ∞ times 0 is NaN
    cells[..., 1:] = cells[..., 1:].clip(-LARGEST.value, LARGEST.value)
    return cells


@jit
def value(x: Block, gate: Block, KIND: tl.constexpr, LOG: tl.constexpr) -> Block:
    """gate(x), or its log: exactly 0, −∞ and 1 where it saturates."""
    if KIND == "step":
        low = float("-inf") if LOG else 0.0
        out = tl.where(x > 0, 0.0 if LOG else 1.0, low)
        return tl.where(x == x, out, x)
    if KIND == "logistic":
        t = x * tl.load(gate)
        fade = tl.exp(-tl.abs(t))
        if LOG:
            # log(1 + fade) would lose the digits of a small fade
            series = fade * (1 - fade * (0.5 - fade * (1.0 / 3 - fade * 0.25)))
            return tl.where(t < 0, t, 0.0) - tl.where(fade < 0.03125, series, tl.log(1 + fade))
        return tl.where(t < 0, fade, 1.0) / (1 + fade)
    cell, u, _ = _locate(x, gate)
    first, second = tl.load(cell), tl.load(cell + 1)
    return first + u * (second + u * (tl.load(cell + 2) + u * tl.load(cell + 3)))


@jit
def slope(x: Block, gate: Block, KIND: tl.constexpr, LOG: tl.constexpr) -> Block:
    """d gate/dx, or that of its log: 0 where the gate is exactly 0 or 1."""
    if KIND == "step":
        return tl.where(x == x, 0.0, x)
    scale = tl.load(gate)
    if KIND == "logistic":
        t = x * scale
        fade = tl.exp(-tl.abs(t))
        rest = tl.where(t < 0, 1.0, fade) / (1 + fade)
        if LOG:
            return scale * rest
        return scale * fade / ((1 + fade) * (1 + fade))
    cell, u, width = _locate(x, gate)
    rise = tl.load(cell + 1) + u * (2 * tl.load(cell + 2) + u * 3 * tl.load(cell + 3))
    # the cubic may run against x, but the gate never falls
    out = scale * tl.abs(rise) * width
    return tl.where(out > LARGEST, LARGEST, out)


@jit
def _locate(x: Block, gate: Block) -> tuple[Block, Block, Block]:
    """Where the cubic of x is, x's share of that cell, and the reciprocal of the cell's width."""
    size, most = tl.abs(x), tl.load(gate + 7)
    # far beyond saturation there could be an ∞ − ∞
    size = tl.where(size > most, most, size)
    y = tl.load(gate) * size
    # rounded once: near saturation the gate is a function of 1−y alone
    z = tl.fma(-tl.load(gate + 1), size, tl.fma(-tl.load(gate), size, 1.0))
    z = tl.where(z < 0, 0.0, z)
    zero = y == 0
    y += tl.load(gate + 2)
    bent = y <= z
    w = tl.where(bent, y, z)
    bits = w.to(tl.int32, bitcast=True)
    first = tl.where(bent, tl.load(gate + 5), tl.load(gate + 4)).to(tl.int32)
    half = tl.load(gate + 3).to(tl.int32)
    row = (bits >> SHIFT) - first
    # the tail of a steep gate is no float32
    row = tl.where(zero, tl.load(gate + 6).to(tl.int32), row)
    # z = 0 has no bits of its own and NaN has too many
    row = tl.minimum(tl.maximum(row, 0), half - 1) + tl.where(x > 0, half, 0)
    width = ((-(bits >> 23) + WIDTHS) << 23).to(tl.float32, bitcast=True)
    left = (bits & CELL).to(tl.float32, bitcast=True)
    return gate + HEADER + 4 * row, (w - left) * width, width


@jit
def look_up(
    x_ptr: Block, grad_ptr: Block, out_ptr: Block, gate: Block, size: Block,
    KIND: tl.constexpr, LOG: tl.constexpr, SLOPE: tl.constexpr, ELEMENTS: tl.constexpr,
) -> None:  # fmt: skip
    """out = gate(x), or grad · gate'(x)."""
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    x = tl.load(x_ptr + i, i < size, 0.0)
    if SLOPE:
        out = tl.load(grad_ptr + i, i < size, 0.0) * slope(x, gate, KIND, LOG)
    else:
        out = value(x, gate, KIND, LOG)
    tl.store(out_ptr + i, out, i < size)


def alpha_sigmoid(x: Tensor, alpha: float) -> Tensor:
    """reference.alpha_sigmoid of float32, the value to 2e-7, the slope to 1e-6 of its largest."""
    return _look_up(x, device_gate(Gate("alpha", alpha), x.device, log=False), False)


def log_alpha_sigmoid(x: Tensor, alpha: float) -> Tensor:
    """reference.log_alpha_sigmoid of float32, to 2e-7 of itself or of 1, whichever is more."""
    return _look_up(x, device_gate(Gate("alpha", alpha), x.device), True)


class _TableLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: DeviceGate, log: bool) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.gate, ctx.log = gate, log
        return _launch(x, x, gate, log, slopes=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return _launch(x, grad.contiguous(), ctx.gate, ctx.log, slopes=True), None, None


_look_up: Callable[[Tensor, DeviceGate, bool], Tensor] = _TableLookup.apply


@on_its_device
def _launch(x: Tensor, grad: Tensor, gate: DeviceGate, log: bool, slopes: bool) -> Tensor:
    out = torch.empty_like(x)
    if x.numel():
        look_up[(cdiv(x.numel(), ELEMENTS),)](
            x, grad, out, gate.numbers, x.numel(), KIND=gate.kind, LOG=log, SLOPE=slopes,
            ELEMENTS=ELEMENTS, **FUSION,
        )  # fmt: skip
    return out
