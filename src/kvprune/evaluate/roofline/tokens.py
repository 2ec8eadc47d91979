"""Training and reading a prompt by their kernels, beside flash attention."""

from __future__ import annotations

from typing import NamedTuple

from kvprune.evaluate.cost.formulas import BYTES
from kvprune.evaluate.cost.shape import AttentionShape
from kvprune.evaluate.roofline.decode import SOFTMAX, token_bytes
from kvprune.evaluate.roofline.work import Work

# log σ of a score and its place in a running sum; per pair
GATE = 40
# queries and keys of a tile: ours, and flash attention's and FlexAttention's
TILE, BLOCK = 64, 128


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
    """Dense, causal: two products forward, and five backward, in which the first is done again."""
    one = product(layer, text.pairs)
    states, softmax = state_bytes(layer, dtype, text), SOFTMAX * layer.query_heads * text.pairs
    read = tile_bytes(layer, dtype, text.pairs, BLOCK)
    works = {"forward": Work(states, 2 * one, scalar=softmax, cached=read)}
    if backward:
        works["backward"] = Work(2 * states, 5 * one, scalar=softmax, cached=2 * read, launches=3)
    return works


def training(
    layer: AttentionShape, dtype: str, text: Text, gates_per_head: bool = False
) -> dict[str, Work]:
    """Log keep as tiles, once for all heads, then attention over those that are alive.

    Backward, log keep is computed again, and three kernels compute the weights again: nine products
    for flash attention's five. Tiles of 64 × 64, each read with log keep's 4 bytes a pair by every
    head. `gates_per_head`: if a kernel had to compute them itself for each head, as a function that
    modifies scores would.
    """
    pairs, heads = text.pairs * text.alive, layer.query_heads
    states = state_bytes(layer, dtype, text)
    interaction = text.rows * text.length * text.rank * 2 * 4
    one, softmax = product(layer, pairs), SOFTMAX * heads * pairs
    scores, gate, tiles = 2 * text.rank * pairs, GATE * pairs, 4 * pairs
    read = tile_bytes(layer, dtype, pairs, TILE) + heads * tiles
    keep = Work(interaction + tiles, scores=scores, scalar=gate)
    more = (0.0, 0.0)
    if gates_per_head:
        keep = Work(interaction, scores=scores, scalar=gate)
        more, read, tiles = (heads * scores, heads * gate), read - heads * tiles, 0.0

    def attention(products: int, written: float = 0.0) -> Work:
        scalar = softmax + more[1]
        return Work(states + tiles + written, products * one, more[0], scalar, read)

    return {
        "log keep": keep,
        "forward": attention(2),
        "log keep, again": keep,
        "gradients of queries": attention(3),
        "gradients of keys and values": attention(4),
        "gradients of log keep": attention(2, written=tiles),
        "gradients of votes": Work(
            3 * tiles + 2 * interaction, scores=3 * scores, scalar=gate, launches=2
        ),
    }


FORWARD = ("log keep", "forward")


def prefill(
    layer: AttentionShape, dtype: str, text: Text, sparsity: float, packed: bool
) -> dict[str, Work]:
    """The first drop of each key, then attention over what is alive.

    packed: a block of queries gathers its survivors; else whole blocks of keys are skipped, and
    of survivors that lie anywhere hardly a block is free: 1 − s^128 of them are not.
    """
    share = 1 - sparsity if packed else 1 - sparsity**BLOCK
    pairs, states = share * text.pairs, state_bytes(layer, dtype, text)
    lists = 2 * 4 * pairs / TILE if packed else 0.0  # of keys: written, and read
    return {
        # a block of keys is finished when its last one is gone
        "first drop": Work(
            text.rows * text.length * text.rank * 2 * 4, scores=2 * text.rank * text.pairs
        ),
        "attention": Work(
            states + lists,
            2 * product(layer, pairs),
            scalar=SOFTMAX * layer.query_heads * pairs,
            cached=tile_bytes(layer, dtype, pairs, TILE if packed else BLOCK),
            launches=2 if packed else 1,
        ),
    }


def product(layer: AttentionShape, pairs: float) -> float:
    """FLOPs of one product of all heads: half of those that attention forward needs."""
    return layer.query_heads * (layer.key_size + layer.value_size) * pairs


def state_bytes(layer: AttentionShape, dtype: str, text: Text) -> float:
    """Queries, keys, values and outputs."""
    query = layer.query_heads * (layer.key_size + layer.value_size) * BYTES[dtype]
    return text.rows * text.length * (token_bytes(layer, dtype) + query)


def tile_bytes(layer: AttentionShape, dtype: str, pairs: float, block: int) -> float:
    """Keys and values that every head reads anew for each block of queries."""
    return layer.query_heads * (layer.key_size + layer.value_size) * BYTES[dtype] * pairs / block
