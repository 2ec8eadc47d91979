"""A rotation that spreads what one number of a vector holds over all of them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache
def hadamard(size: int, device: torch.device) -> Tensor | None:
    """The orthogonal, symmetric matrix H / √size, or None if the size is not a power of two.

    (q H) · (k H) = q · k, and a key with one large number, which would leave few of int8's 255
    steps for the others, becomes one of many even numbers.
    """
    if size < 1 or size & (size - 1):
        return None
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    rotation: Tensor = (matrix / size**0.5).to(device)
    return rotation
