"""Training and reading a prompt by their kernels, beside flash attention."""

from __future__ import annotations

from typing import NamedTuple

from kvprune.evaluate.cost.formulas import BYTES
from kvprune.evaluate.cost.shape import AttentionShape
from kvprune.evaluate.roofline.decode import SOFTMAX, token_bytes
from kvprune.evaluate.roofline.work import Work

# log σ of a score and its place in a running sum; per pair
GATE = 40
# queries of a tile in training, and keys and queries of a FlexAttention block
TILE, BLOCK = 64, 128
# flash attention's backward pass has five products for the forward pass's two
BACKWARD = 2.5


class Text(NamedTuple):
    """Rows of `length` tokens; `alive`: the share of tiles in which any key is left."""

    rows: int
    length: int
    alive: float = 1.0
    rank: int = 64

    @property
    def pairs(self) -> float:
        return self.rows * self.length**2 / 2


def flash(layer: AttentionShape, dtype: str, text: Text, backward: bool = True) -> dict[str, Work]:
    """Dense, causal; keys and values are read again for each block of queries from the cache."""
    products = 2 * layer.query_heads * (layer.key_size + layer.value_size) * text.pairs
    states = text.rows * text.length * (token_bytes(layer, dtype) + _query_bytes(layer, dtype))
    softmax = SOFTMAX * layer.query_heads * text.pairs
    works = {"forward": Work(states, products, scalar=softmax)}
    if backward:
        works["backward"] = Work(2 * states, BACKWARD * products, scalar=softmax, launches=3)
    return works


def training(layer: AttentionShape, dtype: str, text: Text, once_for: int = 1) -> dict[str, Work]:
    """Pairwise gates with a carry per block of queries.

    `once_for`: how many query heads share one computation of a tile's scores. Each of the kernels
    that need the gates computes the scores again, as T² of them would not fit into memory.
    """
    full = flash(layer, dtype, text)
    times = layer.query_heads / once_for
    scores, gate = (amount * text.pairs * text.alive for amount in (2 * text.rank, GATE))
    interaction = text.rows * text.length * text.rank * 2 * 4
    carry = text.rows * text.length**2 / TILE / 2 * 4
    forward, backward = (
        Work(
            work.bytes + interaction + carry,
            work.tensor * text.alive,
            times * scores,
            work.scalar * text.alive + times * gate,
            work.launches,
        )
        for work in full.values()
    )
    return {
        "carry": Work(interaction + carry, scores=scores, scalar=gate),
        "forward": forward,
        "backward, q k v": backward,
        # the attention's weights and their gradients once more, then two products into q_int, k_int
        "backward, votes": Work(
            2 * full["forward"].bytes + 2 * interaction + carry,
            full["forward"].tensor * text.alive,
            3 * scores,
            full["forward"].scalar * text.alive + 2 * gate,
            launches=2,
        ),
    }


def prefill(
    layer: AttentionShape, dtype: str, text: Text, sparsity: float, packed: bool
) -> dict[str, Work]:
    """The first drop of each key, then attention over what is alive.

    packed: a block of queries gathers its survivors; else whole blocks of keys are skipped, and
    of survivors that lie anywhere hardly a block is free: 1 − s^128 of them are not.
    """
    full = flash(layer, dtype, text, backward=False)["forward"]
    share = 1 - sparsity if packed else 1 - sparsity**BLOCK
    gathered = 0.0
    if packed:
        blocks = text.length / BLOCK
        kept = (1 - sparsity) * text.length / 2
        gathered = 2 * text.rows * blocks * kept * token_bytes(layer, dtype)
    return {
        # a stripe of keys is read until its last one is gone
        "first drop": Work(
            text.rows * text.length * text.rank * 2 * 4, scores=2 * text.rank * text.pairs
        ),
        "attention": Work(full.bytes + gathered, full.tensor * share, scalar=full.scalar * share),
    }


def _query_bytes(layer: AttentionShape, dtype: str) -> int:
    """Of one token's queries and outputs."""
    return layer.query_heads * (layer.key_size + layer.value_size) * BYTES[dtype]
