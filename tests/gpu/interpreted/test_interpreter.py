"""What the interpreter can be trusted with, and when it is chosen."""

import pytest
import torch
import triton.language as tl

from kvprune.errors import PruneError
from kvprune.ops.dispatch import Operation
from kvprune.ops.gpu import jit
from kvprune.ops.int8 import reference


@jit
def running_sum(x, total, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    numbers = tl.load(x + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(total + i, tl.cumsum(numbers, 0), mask=i < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_are_interpreted(dtype):
    assert type(running_sum).__name__ == "InterpretedFunction"
    x, total = torch.arange(5).to(dtype), torch.full((8,), -1.0)
    running_sum[(1,)](x, total, 5, 8)
    assert total.tolist() == [0, 1, 3, 6, 10, -1, -1, -1]


def test_the_interpreter_is_only_for_those_who_ask():
    operation, x = Operation(reference.quantise, triton=[torch.float32]), torch.zeros(1)
    assert operation.available() == ["reference", "triton"]
    assert operation.refusal("triton", x) is None
    assert operation.best_backend(x) == "reference"
    with pytest.raises(PruneError, match=r"takes float32 tensors on cuda or cpu, not .*float64"):
        operation.implementation(x.double(), "triton")
