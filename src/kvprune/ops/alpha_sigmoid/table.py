"""The gate as a table: α is constant during a step, so σ_α is a function of x alone.

With y = a·|x| in [0, 1] and z = 1−y, the gate bends where y → 0 (for large α) and where z → 0.
So the cells are spaced like floats: the smaller of y + `tail` and z is cut after its top 6
mantissa bits, 64 cells per octave, and those bits are the cell's number. Each cell holds a cubic
with the exact value and slope at both ends; the slope of the gate is the slope of the cubic.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from kvprune.errors import PruneError
from kvprune.ops.jit import Array, Float64s, Scalar, njit

from .reference import check_alpha, check_temperature

# a float64 without these bits is the left end of its cell
FRACTION_BITS = 46
CELL_MASK = ~((1 << FRACTION_BITS) - 1)
# 1−y is a multiple of this
SMALLEST_Z = 2.0**-53
# the a = α−1 that stands for α = 1: small enough that no float32 saturates
LOGISTIC = 2.0**-140
# the a for α = ∞: every float32 but 0 saturates
STEP = 2.0**200
LARGEST_SLOPE = float(np.finfo(np.float32).max)


class GateTable(NamedTuple):
    """One gate, as plain arrays and scalars that a compiled function can take."""

    gate_cells: Float64s  # (2 · half, 4) float64, cubics; x ≤ 0 first; in a half: z, then y
    log_cells: Float64s  # the same of log gate
    half: int
    scale: float  # y = scale · |x|
    tail: float  # the cells of smaller y are evenly spaced
    first_z: int  # what to take from a float's top bits to get its row
    first_y: int


def gate_table(kind: str, alpha: float) -> GateTable:
    """The table of σ_α(x) for kind "alpha", of σ(alpha · x) for kind "temperature"."""
    if kind == "alpha":
        return alpha_table(check_alpha(alpha))
    if kind == "temperature":
        table = alpha_table(1.0)
        return table._replace(scale=table.scale / check_temperature(1 / alpha))
    raise PruneError(f'the gate is called {kind!r}, which is unknown; use "alpha" or "temperature"')


@functools.lru_cache(maxsize=8)
def alpha_table(alpha: float) -> GateTable:
    a = alpha - 1
    a = STEP if a == math.inf else max(a, LOGISTIC)
    # the gate is straight for y well under 2^−a·min(a, 1), and only x = 0 gives y < a·2^−149
    tail = max(min(a, 1.0) * 2.0 ** -min(a, 1000.0), a * 2.0**-149)
    tail = 2.0 ** min(math.floor(math.log2(tail)), -1)
    # the ends of the cells, in the order of growing y, up to where y + tail = z;
    # z is stored as well as y because 1−y would round
    middle = (1 + tail) / 2
    y = _ends(tail, middle) - tail
    z = _ends(SMALLEST_Z, middle)[::-1]

    # row 0 is z = 0, where the gate is exact
    half = len(z) + len(y) - 1
    cells = np.zeros((2, 2, half, 4))  # gate and log gate, x ≤ 0 and x > 0
    cells[0, 1, 0, 0] = 1
    cells[1, 0, 0, 0] = -np.inf
    if alpha == math.inf:
        cells[:] = cells[:, :, :1]
    else:
        t = _solve(np.concatenate([y, 1 - z]), np.concatenate([1 - y, z]), a)
        cells[:, :, 1 : len(z)] = _cubics(z[::-1], t[: len(y) - 1 : -1], a, -1)
        cells[:, :, len(z) :] = _cubics(y, t[: len(y)], a, 1)
    return GateTable(
        gate_cells=cells[0].reshape(-1, 4),
        log_cells=cells[1].reshape(-1, 4),
        half=half,
        scale=a,
        tail=tail,
        first_z=_top_bits(SMALLEST_Z) - 1,
        first_y=_top_bits(tail) - len(z),
    )


def _ends(low: float, high: float) -> Float64s:
    """The left ends of the cells from that of `low` to that of `high`, and the last right end."""
    top = np.arange(_top_bits(low), _top_bits(high) + 2, dtype=np.int64)
    return (top << FRACTION_BITS).view(np.float64)


def _top_bits(w: float) -> int:
    return int(np.float64(w).view(np.int64)) >> FRACTION_BITS


def _cubics(w: Float64s, t: Float64s, a: float, sign: int) -> Float64s:
    """The gate and its log, at −|x| and |x|, as cubics in w − left end; dy/dw = `sign`."""
    fade = np.exp(-t)
    p, q = fade / (1 + fade), 1 / (1 + fade)  # the gate at −|x| and at |x|
    log_q = -np.log1p(fade)
    with np.errstate(divide="ignore", over="ignore"):
        bend = 1 / (np.exp(a * log_q) * (q * np.exp(-a * t) + p))  # dt/d|x|
    # 2^a at x = 0, which must stay finite: ∞ times a distance of 0 is NaN
    bend = np.minimum(bend, 1e150) * (sign / a)  # dt/dw
    value = np.array([[p, q], [log_q - t, log_q]])  # (2, 2, N + 1)
    slope = np.array([[-p * q, p * q], [-q, p]]) * bend
    # the cubic through both ends with both slopes
    width = np.diff(w)
    rise = np.diff(value) / width
    left, right = slope[..., :-1], slope[..., 1:]
    square = (3 * rise - 2 * left - right) / width
    cube = (left + right - 2 * rise) / width**2
    return np.stack([value[..., :-1], left, square, cube], axis=-1)  # (2, 2, N, 4)


@njit(cache=True)
def _solve(y: Float64s, z: Float64s, a: float) -> Float64s:
    """reference.solve for y in growing order, so that each root is a lower bound of the next."""
    roots = np.empty_like(y)
    t = 0.0
    for i in range(len(y)):
        if y[i] == 0.0:
            roots[i] = 0.0
            continue
        target = -math.log1p(-z[i]) if y[i] > 0.5 else -math.log(y[i])
        t = max(t, 2 / a * math.asinh(y[i] * 2.0 ** min(a - 1, 500.0)))
        for _ in range(50):
            fade, rest = math.exp(-t), math.exp(-a * t)
            gone = -math.expm1(-a * t) if rest > 0.5 else 1 - rest
            second = math.log(gone) if rest > 0.5 else math.log1p(-rest)
            slope = a * (fade / (1 + fade) + rest / gone)
            step = (a * math.log1p(fade) - second - target) / slope
            t += step
            # the next step would be of the order of this one squared
            if abs(step) <= 1e-9 * t:
                break
        roots[i] = t
    return roots


# contract allows a·b+c in one instruction; the other flags of fastmath let the compiler assume
# that −∞ and NaN do not occur, or reorder sums that are exact in this order
device = njit(forceinline=True, fastmath={"contract"})


@device
def _locate(x: Scalar, table: GateTable) -> tuple[Scalar, Scalar]:
    """The row of x and its distance from the left end of that cell, without a branch."""
    y: Scalar = table.scale * abs(np.float64(x))
    z: Scalar = 1.0 - y
    y = y + table.tail
    # each of these is a min or max without a branch, and in this order NaN comes through
    z = 0.0 if z < 0.0 else z
    w = y if y <= z else z
    bits = np.float64(w).view(np.int64)
    row: Scalar = (bits >> FRACTION_BITS) - (table.first_y if y <= z else table.first_z)
    # z = 0 has no bits of its own and NaN has too many
    row = min(max(row, 0), table.half - 1) + (table.half if x > 0 else 0)
    left = np.int64(bits & CELL_MASK).view(np.float64)
    return np.uintp(row), w - left


@device
def _value(x: Scalar, table: GateTable, c: Array) -> Scalar:
    row, t = _locate(x, table)
    return np.float32(c[row, 0] + t * (c[row, 1] + t * (c[row, 2] + t * c[row, 3])))


@device
def _slope(x: Scalar, table: GateTable, c: Array) -> Scalar:
    row, t = _locate(x, table)
    # the cubic may run against x, but the gate never falls
    slope = table.scale * abs(c[row, 1] + t * (2.0 * c[row, 2] + t * (3.0 * c[row, 3])))
    return np.float32(LARGEST_SLOPE if slope > LARGEST_SLOPE else slope)


@device
def gate(x: Scalar, table: GateTable) -> Scalar:
    """gate(x) as float32, exactly 0 and 1 where it saturates."""
    return _value(x, table, table.gate_cells)


@device
def gate_slope(x: Scalar, table: GateTable) -> Scalar:
    """d gate/dx as float32, 0 where the gate is 0 or 1."""
    return _slope(x, table, table.gate_cells)


@device
def log_gate(x: Scalar, table: GateTable) -> Scalar:
    """log gate(x) as float32: −∞ where the gate is 0, 0 where it is 1."""
    return _value(x, table, table.log_cells)


@device
def log_gate_slope(x: Scalar, table: GateTable) -> Scalar:
    """d log gate/dx as float32, 0 where the gate is 0 or 1."""
    return _slope(x, table, table.log_cells)
