"""The decode step's inner loops on LLVM's vectors.

From loops over numbers LLVM makes code that walks up to eight slots side by side, which memory
serves more slowly than one after the other, and that widens a number once per query head. Here a
number is read once, in order, for up to three heads.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core.cgutils import alloca_once, for_range_slice, get_or_insert_function
from numba.extending import intrinsic

from kvprune.ops.decode.scalar import widen_vector
from kvprune.ops.jit import FASTMATH

# numbers in a vector, as many as a register holds: the sums of three heads fit into the sixteen of
# AVX2, and into the 32 of AVX-512. A processor with narrower registers takes a vector in parts
LANES = 16 if get_host_cpu_features().get("avx512f") else 8

# bytes between what is read and what is asked for from memory: two pages, since a processor's own
# prefetching ends with a page
AHEAD = 8192
# of the processor's cache
LINE = 64

F32, I32, I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
ZERO = ir.Constant(ir.VectorType(F32, LANES), [0.0] * LANES)
FLAGS = tuple(sorted(FASTMATH))


def _dot_tile(
    typingctx: Any, logit: Any, query: Any, g: Any, k: Any, j: Any, width: Any, heads: Any,
    slots: Any,
) -> Any:  # fmt: skip
    """logit[g, j] = query[g]·k[j] for a few heads from g on and one or four slots from j on.

    Of each row the first `width` numbers, a multiple of LANES; heads and slots are constants.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        logits, queries, keys = (Rows(context, builder, sig, args, i) for i in (0, 1, 3))
        g, j, width = args[2], args[4], args[5]
        rows = [builder.add(g, I64(q)) for q in range(heads.literal_value)]
        sums = [[Sum(builder, ZERO) for _ in range(slots.literal_value)] for _ in rows]
        for s in range(slots.literal_value):
            slot = builder.add(j, I64(s))
            keys.prefetch_ahead(slot, I64(0), width)
            with for_range_slice(builder, I64(0), width, I64(LANES)) as (d, _):
                key = keys.load(slot, d)
                for row, own in zip(rows, sums, strict=True):
                    own[s].add(queries.load(row, d), key)
        for row, own in zip(rows, sums, strict=True):
            logits.store(totals(builder, [one.value for one in own]), row, j)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(logit, query, i64, k, i64, i64, heads, slots), codegen


def _value_tile(
    typingctx: Any, out: Any, d: Any, p: Any, g: Any, v: Any, start: Any, stop: Any, heads: Any,
    columns: Any,
) -> Any:  # fmt: skip
    """out[g, d:] += Σ p[g, j] v[j, d:] over the slots, for a few heads from g on.

    So many vectors wide as `columns` says, which stay in registers; heads and columns are
    constants.
    """

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        outputs, weights, values = (Rows(context, builder, sig, args, i) for i in (0, 2, 4))
        d, g, start, stop = args[1], args[3], args[5], args[6]
        rows = [builder.add(g, I64(q)) for q in range(heads.literal_value)]
        parts = [builder.add(d, I64(c * LANES)) for c in range(columns.literal_value)]
        sums = [[Sum(builder, outputs.load(row, part)) for part in parts] for row in rows]
        with for_range_slice(builder, start, stop, I64(1)) as (j, _):
            values.prefetch_ahead(j, d, I64(LANES * columns.literal_value))
            shares = [weights.spread(row, j) for row in rows]
            for c, part in enumerate(parts):
                value = values.load(j, part)
                for share, own in zip(shares, sums, strict=True):
                    own[c].add(share, value)
        for row, own in zip(rows, sums, strict=True):
            for part, one in zip(parts, own, strict=True):
                outputs.store(one.value, row, part)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(out, i64, p, i64, v, i64, i64, heads, columns), codegen


def _prefetch(typingctx: Any, address: Any) -> Any:
    """Ask for AHEAD bytes from an address on."""

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        with for_range_slice(builder, I64(0), I64(AHEAD), I64(LINE)) as (place, _):
            address = builder.add(args[0], place)
            prefetch_line(builder, builder.inttoptr(address, ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


# compiled code calls these without the typing context, which a type checker cannot know
dot_tile: Any = intrinsic(prefer_literal=True)(_dot_tile)
value_tile: Any = intrinsic(prefer_literal=True)(_value_tile)
prefetch: Any = intrinsic(_prefetch)


class Rows:
    """An array of two dimensions, read and written in vectors."""

    def __init__(self, context: Any, builder: Any, sig: Any, args: Any, position: int):
        kind = sig.args[position]
        array = context.make_array(kind)(context, builder, args[position])
        self.builder, self.dtype = builder, kind.dtype
        self.start, self.width = array.data, builder.extract_value(array.shape, 1)
        self.number = context.get_value_type(kind.dtype)

    def load(self, row: Any, column: Any) -> Any:
        """As float32, from a column on."""
        place = self._place(row, column, ir.VectorType(self.number, LANES))
        stored = self.builder.load(place, align=self.dtype.bitwidth // 8)
        return widen_vector(self.builder, self.dtype, stored)

    def prefetch_ahead(self, row: Any, column: Any, count: Any) -> None:
        """Ask for the numbers that lie AHEAD of these; behind the end of memory nothing happens."""
        size = self.dtype.bitwidth // 8
        ahead = self.builder.add(column, I64(AHEAD // size))
        stop = self.builder.add(ahead, count)
        with for_range_slice(self.builder, ahead, stop, I64(LINE // size)) as (place, _):
            prefetch_line(self.builder, self._place(row, place, ir.IntType(8)))

    def store(self, vector: Any, row: Any, column: Any) -> None:
        self.builder.store(vector, self._place(row, column, vector.type), align=4)

    def spread(self, row: Any, column: Any) -> Any:
        """One number in all lanes."""
        number = self.builder.load(self._place(row, column, self.number))
        first = self.builder.insert_element(ZERO, number, I32(0))
        return shuffle(self.builder, first, first, [0] * LANES)

    def _place(self, row: Any, column: Any, kind: Any) -> Any:
        index = self.builder.add(self.builder.mul(row, self.width), column)
        return self.builder.bitcast(self.builder.gep(self.start, [index]), kind.as_pointer())


class Sum:
    """A vector that a loop adds to; LLVM keeps it in a register."""

    def __init__(self, builder: Any, first: Any):
        self.builder = builder
        self.place = alloca_once(builder, first.type)  # type: ignore[no-untyped-call]
        builder.store(first, self.place)

    @property
    def value(self) -> Any:
        return self.builder.load(self.place)

    def add(self, a: Any, b: Any) -> None:
        """The product of two vectors."""
        product = self.builder.fmul(a, b, flags=FLAGS)
        self.builder.store(self.builder.fadd(self.value, product, flags=FLAGS), self.place)


def prefetch_line(builder: Any, place: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    call = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
    # to be read, again soon, as data
    builder.call(call, [place, I32(0), I32(3), I32(1)])


def totals(builder: Any, vectors: list[Any]) -> Any:
    """The sum of one vector or the sums of four, as a vector of one or four numbers."""
    wanted = len(vectors)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [add_neighbours(builder, a, b) for a, b in pairs]
    (vector,) = vectors
    while vector.type.count > wanted:
        half = vector.type.count // 2
        low = shuffle(builder, vector, vector, list(range(half)))
        high = shuffle(builder, vector, vector, list(range(half, 2 * half)))
        vector = builder.fadd(low, high, flags=FLAGS)
    return vector


def add_neighbours(builder: Any, a: Any, b: Any) -> Any:
    """Of each four lanes: two sums of neighbours in a, then two in b; one instruction each."""
    n = a.type.count
    even = [start + i for four in range(0, n, 4) for start in (four, n + four) for i in (0, 2)]
    left = shuffle(builder, a, b, even)
    right = shuffle(builder, a, b, [i + 1 for i in even])
    return builder.fadd(left, right, flags=FLAGS)


def shuffle(builder: Any, a: Any, b: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))
