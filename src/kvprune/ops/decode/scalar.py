"""Two scalar functions that LLVM can vectorise inside a Numba loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvprune.ops.jit import Scalar, njit


def _widen(typingctx: Any, x: Any) -> Any:
    """A stored number as float32; bfloat16 arrives as uint16, the upper half of the float32."""
    if x == types.float32:
        return types.float32(types.float32), lambda context, builder, sig, args: args[0]

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        bits = builder.shl(builder.zext(args[0], ir.IntType(32)), ir.IntType(32)(16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(types.uint16), codegen


def _power_of_two(typingctx: Any, exponent: Any) -> Any:
    """2^i for an int32 i from −126 to 127: i as the exponent of a float32."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.add(args[0], i32(127)), i32(23)), ir.FloatType())

    return types.float32(types.int32), codegen


# compiled code calls these without the typing context, which a type checker cannot know
widen: Any = intrinsic(_widen)
power_of_two: Any = intrinsic(_power_of_two)


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
