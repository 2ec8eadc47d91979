"""Triton's compiler, with types."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
import triton
import triton.language as tl

Args = ParamSpec("Args")
Out = TypeVar("Out")

# what a kernel is given or computes: a pointer, a block of numbers or one number. Triton's compiler
# looks up annotations and takes only names of its own; for a type checker this is Any
Block: TypeAlias = tl.tensor

# products and sums in one instruction, whatever the default of this release of Triton is: what
# the tests compile is then what runs
FUSION = {"enable_fp_fusion": True}


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`: a kernel to launch as `kernel[grid](...)`, or a function that kernels call."""
    return triton.jit(kernel)


def jit_with(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`jit` with Triton's options, such as `do_not_specialize`."""
    decorator: Callable[[Callable[..., Any]], Any] = triton.jit(**options)
    return decorator


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def on_its_device(function: Callable[Args, Out]) -> Callable[Args, Out]:
    """Triton launches on the current device, which need not be that of the first tensor."""

    @functools.wraps(function)
    def launch(*args: Args.args, **kwargs: Args.kwargs) -> Out:
        with torch.cuda.device_of(args[0]):
            return function(*args, **kwargs)

    return launch
