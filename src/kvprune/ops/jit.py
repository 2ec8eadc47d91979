"""Numba's compiler, with types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
import numpy.typing as npt

Function = TypeVar("Function", bound=Callable[..., Any])
Array: TypeAlias = npt.NDArray[Any]
# a number whose dtype only the compiler knows
Scalar: TypeAlias = Any
Float64s: TypeAlias = npt.NDArray[np.float64]

_njit: Any = numba.njit


def njit(**options: Any) -> Callable[[Function], Function]:
    """`numba.njit`, for a type checker a decorator that changes nothing."""
    decorator: Callable[[Function], Function] = _njit(**options)
    return decorator
