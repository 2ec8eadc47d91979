"""What a token costs and what a cache holds, as formulas: the paper's Fig. flops_memory.

Counted are multiplications and additions of matrix products, 2 per weight or pair of numbers.
Not counted: biases, norms, activations, softmax, the comparison of a vote with its threshold, and
the embedding, which is a look-up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvprune.errors import PruneError
from kvprune.evaluate.cost.shape import AttentionShape, Shape

PARTS = ("embedding", "logits", "feed-forward", "qkvo", "attention", "drop-tokens")
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
# of an extent: interaction keys are float32, or float16 where keys and values have half precision
# (`Layout`); a slot stores its token's number (int32)
KEY_INT_BYTES, BOOKKEEPING_BYTES = {8: 4, 4: 4, 2: 2}, 4


def decode_flops(
    shape: Shape, context: int, sparsity: float = 0.0, rank: int | None = None
) -> dict[str, float]:
    """FLOPs by part of one more token, in one row, after `context` tokens.

    A pruned layer holds kept = (1 − sparsity) · context of them; the new token votes on those and
    attends to them and to itself:
        attention    2 · heads · (key_size + value_size) · (kept + 1)
        drop-tokens  2 · rank · (2 · width + kept)
    `rank` None: the dense model, without pruning attached.
    """
    kept = (1 - _checked(sparsity, context)) * context
    seen = [min(context, layer.window - 1) if layer.window else kept for layer in shape.layers]
    pairs = [earlier + 1 for earlier in seen]
    return _flops(shape, rank, tokens=1, pairs=pairs, voted=kept)


def prefill_flops(
    shape: Shape, tokens: int, sparsity: float = 0.0, rank: int | None = None
) -> dict[str, float]:
    """FLOPs by part of reading a prompt in one row, with the logits of its last token alone.

    Token k sees itself and (1 − sparsity) · k earlier tokens; its votes go to those. Ours reads
    in blocks and skips keys that no query of a block sees, so it computes somewhat more; dense
    attention is counted without its masked upper half.
    """
    kept = (1 - _checked(sparsity, tokens)) * tokens * (tokens - 1) / 2
    pairs = [tokens + (_window_pairs(tokens, w) if w else kept) for w in _windows(shape)]
    return _flops(shape, rank, tokens=tokens, pairs=pairs, voted=kept)


def _flops(
    shape: Shape, rank: int | None, tokens: int, pairs: list[float], voted: float
) -> dict[str, float]:
    """pairs: (query, key) pairs that each layer attends to; voted: those that are voted on."""
    flops = dict.fromkeys(PARTS, 0.0)
    flops["logits"] = 2.0 * shape.logits
    flops["feed-forward"] = 2.0 * shape.feed_forward * tokens
    for layer, seen in zip(shape.layers, pairs, strict=True):
        flops["qkvo"] += 2.0 * layer.projections * tokens
        flops["attention"] += 2 * layer.query_heads * (layer.key_size + layer.value_size) * seen
        if rank is not None and layer.window is None:
            flops["drop-tokens"] += 2 * rank * (2 * shape.width * tokens + voted)
    return flops


@dataclass(frozen=True)
class CacheBytes:
    """A key-value cache by part; `left_alone`: keys and values of layers that are not pruned."""

    keys: int
    values: int
    interaction_keys: int
    bookkeeping: int
    left_alone: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def cache_bytes(
    shape: Shape,
    context: int,
    sparsity: float = 0.0,
    batch: int = 1,
    rank: int | None = None,
    slack: str = "none",
) -> CacheBytes:
    """Bytes of a cache after `context` tokens per row, in the shape's dtype.

    `rank` None: keys and values alone, as a dense cache holds them. `slack`: what a pruned
    cache has beyond its survivors: "none", "new" or "most", see `slots`.
    """
    kept = round((1 - _checked(sparsity, context)) * context)
    room = slots(kept, slack) if rank is not None else kept
    size = _size(shape.dtype)
    keys = values = left_alone = 0
    for layer in shape.layers:
        per_key, per_value = _slot_bytes(layer, size)
        if layer.window is None:
            keys += batch * room * per_key
            values += batch * room * per_value
        else:
            left_alone += batch * min(context, layer.window) * (per_key + per_value)
    own = 0 if rank is None else batch * room * shape.pruned_layers
    return CacheBytes(
        keys, values, own * (rank or 0) * KEY_INT_BYTES[size], own * BOOKKEEPING_BYTES, left_alone
    )


def slots(kept: int, slack: str) -> int:
    """Slots of the extent that holds a row's `kept` tokens.

    none  the tokens alone
    new   after a prompt: the next multiple of 4 (`extents.tight`)
    most  before it moves to a smaller one (`extents.most_slots`)

    Gaps between extents come on top: at most a sixteenth of all that is held, and one chunk.
    """
    from kvprune.cache.extents import most_slots, tight

    if slack == "none":
        return kept
    if slack == "new":
        return tight(kept)
    if slack == "most":
        return most_slots(kept)
    raise PruneError(f"slack={slack!r} is unknown; choose none, new or most")


def cost(
    shape: Shape,
    sparsities: Iterable[float] = (0.0, 0.5, 0.8),
    contexts: Iterable[int] = (1000,),
    batches: Iterable[int] = (1,),
    rank: int = 64,
) -> Iterator[dict[str, Any]]:
    """One row for the dense model and one per sparsity, by context and batch."""
    cases: list[tuple[str, float, int | None]] = [("dense", 0.0, None)]
    cases += [("pruned", sparsity, rank) for sparsity in sparsities]
    for context in contexts:
        for batch in batches:
            dense = cache_bytes(shape, context, batch=batch).total
            for method, sparsity, r in cases:
                held = cache_bytes(shape, context, sparsity, batch, r)
                most = cache_bytes(shape, context, sparsity, batch, r, "most")
                token = decode_flops(shape, context, sparsity, r)
                yield {
                    "model": shape.name,
                    "method": method,
                    "sparsity": sparsity,
                    "context": context,
                    "batch": batch,
                    "flops_token": sum(token.values()),
                    "flops": token,
                    "flops_prefill": prefill_flops(shape, context, sparsity, r),
                    "cache_bytes": held.total,
                    "bytes": asdict(held),
                    "cache_bytes_most": most.total,
                    "cache_ratio": held.total / dense,
                    "weight_bytes": shape.parameters * _size(shape.dtype),
                }


def _windows(shape: Shape) -> list[int | None]:
    return [layer.window for layer in shape.layers]


def _window_pairs(tokens: int, window: int) -> int:
    """Pairs j < k with k − j < window."""
    full = min(tokens, window)
    return full * (full - 1) // 2 + (tokens - full) * (window - 1)


def _slot_bytes(layer: AttentionShape, size: int) -> tuple[int, int]:
    return layer.key_heads * layer.key_size * size, layer.key_heads * layer.value_size * size


def _size(dtype: str) -> int:
    if dtype not in BYTES:
        raise PruneError(f"dtype {dtype!r} is unknown; choose one of {', '.join(BYTES)}")
    return BYTES[dtype]


def _checked(sparsity: float, context: int) -> float:
    if not 0 <= sparsity <= 1:
        raise PruneError(f"sparsity {sparsity} must be a share of the context, from 0 to 1")
    if context < 0:
        raise PruneError(f"context {context} must be a number of tokens, 0 or more")
    return sparsity
