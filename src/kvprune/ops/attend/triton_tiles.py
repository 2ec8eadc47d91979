"""What all kernels of soft attention share: the size of a tile, products, and dropout.

A tile is BLOCK keys × BLOCK queries. Log keep is the same for all heads, so it is computed once
and kept as tiles, for one stripe of queries at a time: (B, query blocks, key blocks, BLOCK, BLOCK).
Keys come first because the programs that hold a block of keys from tile to tile then hold it as the
left operand of their products, of which a warp needs its own rows and not all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from kvprune.ops.dispatch import interpreted
from kvprune.ops.gpu import FUSION, Block, cdiv, jit

# numbers in a workspace, 64 MB, whatever the text's length; the backward pass has two
WORKSPACE = 2**24


class Tiles(NamedTuple):
    """How a kernel is compiled for these tensors."""

    block: int
    precision: str  # of products of float32
    widen: bool  # products in float32, whatever the dtype
    warps: int = 4

    def options(self) -> dict[str, Any]:
        return {
            "BLOCK": self.block, "PRECISION": self.precision, "WIDEN": self.widen,
            "num_warps": self.warps, "num_stages": 1, **FUSION,
        }  # fmt: skip


def choose_tiles(size: int, hip: bool) -> Tiles:
    """The largest tiles that stay in registers, of operands with rows of so many bytes.

    With 32 × 32 that is so for heads of 128 numbers in bfloat16 and for votes of 64.
    """
    block = 32 if size <= 256 else 16
    # three products of 19 bits are a float32 product, at a third of the speed of tensor cores
    return Tiles(block, "ieee" if hip else "tf32x3", interpreted())


def tiles_for(*operands: Tensor) -> Tiles:
    """Tiles for products of such rows."""
    size = max(padded(x.shape[-1]) * x.element_size() for x in operands)
    return choose_tiles(size, torch.version.hip is not None)


def padded(width: int) -> int:
    """A width of tensor cores: a power of two, 16 at least."""
    return max(16, 1 << (width - 1).bit_length())


def stripe(B: int, T: int, block: int) -> int:
    """How many queries are processed at a time, a multiple of the block."""
    columns = cdiv(T, block) * block
    fits = max(1, WORKSPACE // (B * columns * block))
    return min(fits, cdiv(T, block)) * block


@jit
def product(
    a: Block, b: Block, PRECISION: tl.constexpr, WIDEN: tl.constexpr
) -> Block:  # fmt: skip
    """a @ b, summed in float32. Triton's interpreter cannot multiply bfloat16: there they widen."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@jit
def rows_of(ptr: Block, rows: Block, T: Block, WIDTH: tl.constexpr, PADDED: tl.constexpr) -> Block:
    """Those rows of a contiguous (T, WIDTH), zeros beyond either end."""
    column = tl.arange(0, PADDED)
    place = rows[:, None].to(tl.int64) * WIDTH + column[None, :]
    return tl.load(ptr + place, (rows[:, None] < T) & (column[None, :] < WIDTH), 0.0)


@jit
def put_rows(
    ptr: Block, rows: Block, T: Block, block: Block, WIDTH: tl.constexpr, PADDED: tl.constexpr
) -> None:  # fmt: skip
    """The inverse, in the pointer's dtype."""
    column = tl.arange(0, PADDED)
    place = rows[:, None].to(tl.int64) * WIDTH + column[None, :]
    inside = (rows[:, None] < T) & (column[None, :] < WIDTH)
    tl.store(ptr + place, block.to(ptr.dtype.element_ty), inside)


@jit
def tile_of(number: Block, BLOCK: tl.constexpr) -> Block:
    """Where the numbers of a tile are: keys × queries."""
    i = tl.arange(0, BLOCK)
    return number.to(tl.int64) * BLOCK * BLOCK + i[:, None] * BLOCK + i[None, :]


@jit
def turned_tile_of(number: Block, BLOCK: tl.constexpr) -> Block:
    """The same as queries × keys."""
    i = tl.arange(0, BLOCK)
    return number.to(tl.int64) * BLOCK * BLOCK + i[:, None] + i[None, :] * BLOCK


@jit
def capped(logits: Block, cap: Block, CAP: tl.constexpr) -> Block:
    """cap · tanh(logits / cap)"""
    if CAP:
        # tanh x = 1 − 2 / (1 + e^2x); an infinite e^2x is no harm
        return cap * (1 - 2 / (1 + tl.exp(2 * logits / cap)))
    return logits


@jit
def stays(
    seed: Block, head: Block, query: Block, key: Block, share: Block, BLOCK: tl.constexpr
) -> Block:
    """The factors of dropout for a tile: a function of the numbers of head, query and key alone.

    One of query and key is a column, the other a row.
    """
    zero = tl.zeros((BLOCK, BLOCK), dtype=tl.int32)
    first = tl.philox(seed, zero + key, zero + query, zero + head, zero)[0]
    return tl.where(tl.uint_to_uniform_float(first) >= share, 1 / (1 - share), 0.0)
