"""A decode step by its kernels, beside dense flash decoding; and where pruning begins to win."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvprune.evaluate.cost.formulas import BOOKKEEPING_BYTES, BYTES, KEY_INT_BYTES
from kvprune.evaluate.cost.shape import AttentionShape, Shape
from kvprune.evaluate.roofline.work import Gpu, Work, seconds

# softmax: subtract, exponentiate on a slower unit, add up, rescale; per pair and query head
SOFTMAX = 16

# bytes per survivor of the list of those who left: written, set, read
LISTED = 16


class Case(NamedTuple):
    """What is decoded: one token for each of `rows`, after `context`, of which a share is gone."""

    rows: int
    context: int
    sparsity: float = 0.8
    rank: int = 64

    @property
    def kept(self) -> float:
        return (1 - self.sparsity) * self.context


def token_bytes(layer: AttentionShape, dtype: str) -> int:
    """Of one token's key and value."""
    return layer.key_heads * (layer.key_size + layer.value_size) * BYTES[dtype]


def slot_bytes(layer: AttentionShape, dtype: str, rank: int) -> int:
    """Of what a pruned layer stores with a token: an interaction key and a number come on top."""
    return token_bytes(layer, dtype) + rank * KEY_INT_BYTES[BYTES[dtype]] + BOOKKEEPING_BYTES


def dense(layer: AttentionShape, dtype: str, case: Case) -> list[Work]:
    """Flash decoding: parts of long rows, then their sum."""
    pairs = case.rows * case.context
    return [Work(
        bytes=pairs * token_bytes(layer, dtype),
        tensor=2 * layer.query_heads * (layer.key_size + layer.value_size) * pairs,
        scalar=SOFTMAX * layer.query_heads * pairs,
        launches=2,
    )]  # fmt: skip


def pruned(layer: AttentionShape, dtype: str, case: Case, width: int) -> dict[str, Work]:
    """Vote, drop and attend in one pass over the survivors; then close the holes.

    Interaction weights are float32 and read once a step, whatever the number of rows. In a cache
    that keeps its share, a token comes in at each step and `sparsity` tokens leave; each that
    leaves is replaced by the row's last. Every key head votes for itself, and K_int is counted
    once: programs that run at the same time share it in the second-level cache.
    """
    slot = slot_bytes(layer, dtype, case.rank)
    pairs = case.rows * case.kept
    return {
        "project": Work(
            bytes=2 * width * case.rank * 4,
            scores=4 * width * case.rank * case.rows,
            launches=2,
        ),
        "vote, drop, attend": Work(
            bytes=pairs * slot,
            tensor=2 * layer.query_heads * (layer.key_size + layer.value_size) * pairs,
            scores=2 * case.rank * layer.key_heads * pairs,
            scalar=SOFTMAX * layer.query_heads * pairs,
            launches=2,
        ),
        # the list of those who left is read, then their slots are filled
        "close the holes": Work(
            bytes=LISTED * pairs + case.rows * case.sparsity * 2 * slot, launches=2
        ),
    }


def least_sparsity(layer: AttentionShape, dtype: str, rank: int = 64) -> float:
    """Below this share the interaction keys cost more bytes than dropped tokens save."""
    return 1 - token_bytes(layer, dtype) / slot_bytes(layer, dtype, rank)


def break_even(shape: Shape, case: Case, gpu: Gpu, launch: float) -> float:
    """The context from which a layer's attention is faster pruned than dense; inf if never.

    Both times are lines over the context:  fixed + context · slope.
    """
    layer = next(layer for layer in shape.layers if layer.window is None)

    def cost(context: int) -> tuple[float, float]:
        own = case._replace(context=context)
        works = pruned(layer, shape.dtype, own, shape.width).values()
        return (
            seconds(dense(layer, shape.dtype, own), gpu, launch),
            seconds(works, gpu, launch),
        )

    (dense_0, pruned_0), (dense_1, pruned_1) = cost(0), cost(10**6)
    slope = (dense_1 - dense_0 - pruned_1 + pruned_0) / 10**6
    return (pruned_0 - dense_0) / slope if slope > 0 else math.inf


def step(shape: Shape, case: Case, gpu: Gpu, launch: float) -> tuple[float, float]:
    """Seconds of a whole decode step, dense and pruned.

    Outside of attention: the weights, read once, or their products with many rows; about ten
    kernels in a layer.
    """
    weights = shape.feed_forward + shape.logits + sum(layer.projections for layer in shape.layers)
    outside = Work(
        bytes=weights * BYTES[shape.dtype],
        tensor=2 * weights * case.rows,
        launches=10 * len(shape.layers),
    )
    times = [outside.seconds(gpu, launch)] * 2
    for layer in shape.layers:
        own = case
        if layer.window is not None:
            own = case._replace(context=min(case.context, layer.window))
        left_alone = seconds(dense(layer, shape.dtype, own), gpu, launch)
        times[0] += left_alone
        if layer.window is None:
            works = pruned(layer, shape.dtype, own, shape.width).values()
            times[1] += seconds(works, gpu, launch)
        else:
            times[1] += left_alone
    return times[0], times[1]
