"""Linear layers for a few rows at a time, as decoding has them: a plain version and a kernel.

torch multiplies a single row by half-precision weights at less than half of what the memory
delivers (`benchmarks/linear.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvprune.ops.dispatch import Operation
from kvprune.ops.linear import reference

STORED = [torch.float32, torch.bfloat16, torch.float16]
LINEAR = Operation(reference.linear, cpu=STORED)

# with more rows the products take longer than reading the weights, and torch is faster
MOST_ROWS = 4


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, backend: str | None = None
) -> Tensor:
    """See reference.linear."""
    return LINEAR.implementation(x, backend)(x, weight, bias)


# as an operator of torch, for `torch.compile`; `torch.library.custom_op` would add as much time
# to each call as a small layer takes
LIBRARY = torch.library.Library("kvprune", "FRAGMENT")
LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
LIBRARY.impl("linear", linear, "CompositeExplicitAutograd")


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


torch.library.register_fake("kvprune::linear", _fake, lib=LIBRARY)


def linear_in_graph(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` as that operator."""
    out: Tensor = torch.ops.kvprune.linear(x, weight, bias)
    return out
