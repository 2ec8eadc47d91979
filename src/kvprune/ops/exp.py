"""e^x in float32 that LLVM can vectorise inside a Numba loop."""

from __future__ import annotations

import numpy as np

from kvprune.ops.decode.scalar import power_of_two
from kvprune.ops.jit import Scalar, njit

# e^x rounds to 0 below the first, and to infinity above the second
LOWEST, HIGHEST = np.float32(-104.0), np.float32(89.0)
PER_LN_2 = np.float32(1.44269504)
# ln 2 in two parts, the first with few enough bits that i · part is exact
LN_2_HIGH, LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
HALF, ONE = np.float32(0.5), np.float32(1)
# (e^r − 1 − r) / r², of Cephes' expf; highest power first
C5, C4, C3 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
C2, C1, C0 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


# inlined by LLVM and not by Numba: sums that are reordered, as callers may allow, would lose the
# low part of ln 2
@njit(forceinline=True, fastmath={"contract"})
def exp(x: Scalar) -> Scalar:
    """e^x for any float32, within about 1 unit in the last place; NaN stays NaN.

    e^x = 2^i · e^r with i = round(x / ln 2) and |r| ≤ ln 2 / 2.
    """
    bounded = x if x > LOWEST else LOWEST
    bounded = bounded if bounded < HIGHEST else HIGHEST
    rounded = np.rint(bounded * PER_LN_2)
    i = np.int32(rounded)
    r = bounded - rounded * LN_2_HIGH
    r = r - rounded * LN_2_LOW
    e = ((((C5 * r + C4) * r + C3) * r + C2) * r + C1) * r + C0
    e = e * (r * r) + r + ONE
    # in two steps: 2^128 and 2^−150 have no place in a float32's exponent
    half = i >> np.int32(1)
    e = e * power_of_two(np.int32(half)) * power_of_two(np.int32(i - half))
    return e if x == x else x
