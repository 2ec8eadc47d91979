"""Numba's compiler, with types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numba
import numpy as np
import numpy.typing as npt
from numba.core import event

Function = TypeVar("Function", bound=Callable[..., Any])
Array: TypeAlias = npt.NDArray[Any]
# a number whose dtype only the compiler knows
Scalar: TypeAlias = Any
Float64s: TypeAlias = npt.NDArray[np.float64]

# sums may be reordered; NaN and infinities keep their meaning
FASTMATH = {"reassoc", "contract", "nsz", "arcp"}

_njit: Any = numba.njit


def njit(**options: Any) -> Callable[[Function], Function]:
    """`numba.njit`, for a type checker a decorator that changes nothing."""
    decorator: Callable[[Function], Function] = _njit(**options)
    return decorator


class _Starts(event.Listener):
    def __init__(self, call: Callable[[], None]):
        self.call = call

    def on_start(self, _: Any) -> None:
        self.call()

    def on_end(self, _: Any) -> None:
        pass


@contextmanager
def on_compile(call: Callable[[], None]) -> Iterator[None]:
    """Call it whenever a kernel is compiled in this block, and not found in Numba's cache."""
    with event.install_listener("numba:compile", _Starts(call)):
        yield
