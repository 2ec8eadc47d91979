"""Scalar functions that LLVM can vectorise inside a Numba loop, and arrays at an address."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types  # type: ignore[attr-defined]
from numba.extending import intrinsic

from kvprune.ops.jit import Array, Scalar, njit

# NumPy's dtypes for what a table stores; those that NumPy lacks, as integers with their bits
BITS: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.bfloat16: np.dtype(np.uint16),
    torch.float16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
}


def _widen(typingctx: Any, x: Any) -> Any:
    """A stored number as float32; the type of `x` tells how it is stored, see `BITS`."""
    i32, f32 = ir.IntType(32), ir.FloatType()

    def same(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return args[0]

    def bfloat16(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        # the upper half of the float32
        return builder.bitcast(builder.shl(builder.zext(args[0], i32), i32(16)), f32)

    def float16(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        # exponent and fraction in their places of a float32, whose exponent counts from 112 lower;
        # the product also brings numbers too small for an exponent to theirs. Not for infinities.
        bits = builder.sext(args[0], i32)
        sign = builder.and_(bits, i32(0x80000000 - 2**32))
        rest = builder.shl(builder.and_(bits, i32(0x7FFF)), i32(13))
        number = builder.fmul(builder.bitcast(rest, f32), ir.Constant(f32, 2.0**112))
        return builder.bitcast(builder.or_(builder.bitcast(number, i32), sign), f32)

    def int8(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.sitofp(args[0], f32)

    kinds = {
        types.float32: same,
        types.uint16: bfloat16,
        types.int16: float16,
        types.int8: int8,
    }
    return (types.float32(x), kinds[x]) if x in kinds else None


def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2^i for an int32 i from −126 to 127: i as the exponent of a float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.add(args[0], i32(127)), i32(23)), ir.FloatType())

    return types.float32(types.int32), codegen


def _pointer(typingctx: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to numbers like those of the array `kind`."""
    pointer = types.CPointer(kind.dtype)  # type: ignore[no-untyped-call]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, kind), codegen


# compiled code calls these without the typing context, which a type checker cannot know
widen: Any = intrinsic(_widen)
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
