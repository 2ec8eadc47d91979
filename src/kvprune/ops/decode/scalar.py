"""Scalar functions that LLVM can vectorise inside a Numba loop, and arrays at an address."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import carray, config, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from kvprune.ops.jit import Array, Scalar, njit

F16, F32, I32 = ir.HalfType(), ir.FloatType(), ir.IntType(32)

# x86 processors have an instruction that widens eight or sixteen float16; without it LLVM would
# call a function that is not there, as it would for a target that the user has chosen
HAS_FLOAT16 = get_host_cpu_features().get("f16c", False) and not (
    config.CPU_NAME or config.CPU_FEATURES  # type: ignore[attr-defined]
)

# NumPy's dtypes for what a table stores; those that NumPy lacks, as integers with their bits
BITS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
}


def _widen(typingctx: Any, x: Any) -> Any:
    """A stored number as float32; the type of `x` tells how it is stored, see `BITS`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return WIDEN[x](builder, args[0], lambda element: element)

    return (types.float32(x), codegen) if x in WIDEN else None


def widen_vector(builder: Any, dtype: Any, x: Any) -> Any:
    """`widen` for a vector of such numbers, where LLVM's instructions are put together."""
    return WIDEN[dtype](builder, x, lambda element: ir.VectorType(element, x.type.count))


def _same(builder: Any, x: Any, like: Any) -> Any:
    return x


def _bfloat16(builder: Any, x: Any, like: Any) -> Any:
    # the upper half of the float32
    bits = builder.zext(x, like(I32))
    return builder.bitcast(builder.shl(bits, constant(bits.type, 16)), like(F32))


def _float16(builder: Any, x: Any, like: Any) -> Any:
    if HAS_FLOAT16:
        return builder.fpext(builder.bitcast(x, like(F16)), like(F32))
    # exponent and fraction in their places of a float32, whose exponent counts from 112 lower;
    # the product also brings numbers too small for an exponent to theirs. Not for infinities.
    i32, f32 = like(I32), like(F32)
    bits = builder.sext(x, i32)
    sign = builder.and_(bits, constant(i32, 0x80000000 - 2**32))
    rest = builder.shl(builder.and_(bits, constant(i32, 0x7FFF)), constant(i32, 13))
    number = builder.fmul(builder.bitcast(rest, f32), constant(f32, 2.0**112))
    return builder.bitcast(builder.or_(builder.bitcast(number, i32), sign), f32)


def _int8(builder: Any, x: Any, like: Any) -> Any:
    return builder.sitofp(x, like(F32))


WIDEN = {
    types.float32: _same,
    types.uint16: _bfloat16,
    types.int16: _float16,
    types.int8: _int8,
}


def _narrow(typingctx: Any, x: Any, kind: Any) -> Any:
    """A float32 as the array `kind` stores it, rounded to the nearest; see `BITS`."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return NARROW[kind.dtype](builder, args[0])

    return (kind.dtype(types.float32, kind), codegen) if kind.dtype in NARROW else None


def _as_bfloat16(builder: Any, x: Any) -> Any:
    # adding just under half of what is cut off, or half where the last bit that stays is odd;
    # in a NaN that could carry into the sign, so its bits are given
    bits = builder.bitcast(x, I32)
    odd = builder.and_(builder.lshr(bits, I32(16)), I32(1))
    rounded = builder.lshr(builder.add(bits, builder.add(odd, I32(0x7FFF))), I32(16))
    is_nan = builder.fcmp_unordered("uno", x, x)
    return builder.trunc(builder.select(is_nan, I32(0x7FC0), rounded), ir.IntType(16))


NARROW = {types.float32: lambda builder, x: x, types.uint16: _as_bfloat16}


def constant(kind: Any, number: float) -> Any:
    """The number, or a vector of it."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2^i for an int32 i from −126 to 127: i as the exponent of a float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(args[0], I32(127)), I32(23)), F32)

    return types.float32(types.int32), codegen


def _pointer(typingctx: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to numbers like those of the array `kind`."""
    pointer = types.CPointer(kind.dtype)  # type: ignore[no-untyped-call]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, kind), codegen


# compiled code calls these without the typing context, which a type checker cannot know
widen: Any = intrinsic(_widen)
narrow: Any = intrinsic(_narrow)
power_of_two: Any = intrinsic(_power_of_two)
pointer: Any = intrinsic(_pointer)


@njit(inline="always")
def at(address: int, shape: tuple[int, ...], kind: Array) -> Array:
    """The array of this shape that begins at this address, of numbers like those of `kind`."""
    return carray(pointer(address, kind), shape)


@njit(inline="always")
def exp(x: Scalar) -> Scalar:
    """e^x for x ≤ 0, within 2 units in the last place; at least e^−87.

    e^x = 2^i · e^r with i = round(x / ln 2) and |r| ≤ ln 2 / 2; a call to the C library's
    function per number would cost more than reading the number's key.
    """
    x = max(x, np.float32(-87.0))
    i = np.int32(x * np.float32(1.44269504) - np.float32(0.5))
    # ln 2 in two parts, the first with few enough bits that i · part is exact
    r = x - np.float32(i) * np.float32(0.693359375)
    r = r - np.float32(i) * np.float32(-2.12194440e-4)
    e = np.float32(1 / 720)
    for c in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
        e = e * r + np.float32(c)
    return e * power_of_two(i)
