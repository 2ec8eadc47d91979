"""Triton's compiler, with types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import triton

# what a kernel is given or computes: a pointer, a block of numbers or one number
Block: TypeAlias = Any

# products and sums in one instruction, whatever the default of this release of Triton is: what
# the tests compile is then what runs
FUSION = {"enable_fp_fusion": True}


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`: a kernel to launch as `kernel[grid](...)`, or a function that kernels call."""
    return triton.jit(kernel)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
