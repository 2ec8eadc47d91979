"""A product of small matrices in bfloat16, summed in float32: the inner loop of hard attention.

A CPU that multiplies bfloat16 has one instruction for it: sixteen sums, and to each the products of
two pairs of numbers are added. Elsewhere the same is put together from float32 products.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core.cgutils import for_range_slice, get_or_insert_function
from numba.extending import intrinsic

from kvprune.ops.decode.scalar import constant
from kvprune.ops.decode.tiles import I32, I64, Sum

# 6 rows of 4 vectors: 24 sums in registers, beside 4 of the right matrix and one of the left
ROWS, VECTORS, LANES = 6, 4, 16
COLUMNS = VECTORS * LANES

F32S, I32S = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(I32, LANES)
INSTRUCTION = "llvm.x86.avx512bf16.dpbf16ps.512"


@cache
def has_bfloat16_products() -> bool:
    """Whether this CPU has the instruction."""
    return bool(llvm.get_host_cpu_features().get("avx512bf16"))


def _multiply(
    typingctx: Any, c: Any, column: Any, a: Any, b: Any, first: Any, steps: Any
) -> Any:  # fmt: skip
    """c[:6, column : column + 64] = Σ a[:6, i] · b[first + i] over so many steps i.

    Elements of a and b are pairs of bfloat16 in 32 bits: their products are added up. The arrays
    are contiguous; b has 64 columns.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        sums, left, right = (_Matrix(context, builder, sig, args, i) for i in (0, 2, 3))
        column, first, steps = args[1], args[4], args[5]
        own = [[Sum(builder, constant(F32S, 0.0)) for _ in range(VECTORS)] for _ in range(ROWS)]
        with for_range_slice(builder, I64(0), steps, I64(1)) as (i, _):
            at = builder.add(first, i)
            vectors = [right.load(at, I64(LANES * v), I32S) for v in range(VECTORS)]
            for r in range(ROWS):
                pair = left.load(I64(r), i, I32)
                pairs = builder.shuffle_vector(
                    builder.insert_element(constant(I32S, 0), pair, I32(0)),
                    constant(I32S, 0),
                    ir.Constant(I32S, [0] * LANES),
                )
                for total, vector in zip(own[r], vectors, strict=True):
                    _add_products(builder, total, pairs, vector)
        for r in range(ROWS):
            for v, total in enumerate(own[r]):
                sums.store(total.value, I64(r), builder.add(column, I64(LANES * v)))
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(c, i64, a, b, i64, i64), codegen


# compiled code calls it without the typing context, which a type checker cannot know
multiply: Any = intrinsic(_multiply)


def _add_products(builder: Any, total: Sum, a: Any, b: Any) -> None:
    if has_bfloat16_products():
        kind = ir.FunctionType(F32S, [F32S, I32S, I32S])
        function = get_or_insert_function(builder.module, kind, INSTRUCTION)  # type: ignore[no-untyped-call]
        builder.store(builder.call(function, [total.value, a, b]), total.place)
        return
    for half in (_low, _high):
        total.add(half(builder, a), half(builder, b))


def _low(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.shl(pairs, constant(I32S, 16)), F32S)


def _high(builder: Any, pairs: Any) -> Any:
    return builder.bitcast(builder.and_(pairs, constant(I32S, -65536)), F32S)


class _Matrix:
    """A contiguous array of two dimensions whose elements have 32 bits."""

    def __init__(self, context: Any, builder: Any, sig: Any, args: Any, position: int):
        array = context.make_array(sig.args[position])(context, builder, args[position])
        self.builder, self.start = builder, array.data
        self.width = builder.extract_value(array.shape, 1)

    def load(self, row: Any, column: Any, kind: Any) -> Any:
        return self.builder.load(self._place(row, column, kind), align=4)

    def store(self, vector: Any, row: Any, column: Any) -> None:
        self.builder.store(vector, self._place(row, column, vector.type), align=4)

    def _place(self, row: Any, column: Any, kind: Any) -> Any:
        index = self.builder.add(self.builder.mul(row, self.width), column)
        return self.builder.bitcast(self.builder.gep(self.start, [index]), kind.as_pointer())
