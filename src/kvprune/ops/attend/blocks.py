"""How a long row is split: queries in blocks, and for each block only the keys still alive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# wide enough for full speed of the matrix products, small enough that a block of logits of a
# dozen heads stays in the last-level cache
BLOCK = 128
# numbers of a head, or of a vote, of which the smallest tile of Triton's kernels fits into the
# shared memory of every device
WIDEST = 256


def query_blocks(length: int, block: int = BLOCK) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


def group_size(x: Tensor) -> int:
    return 1 if x.device.type == "cpu" else x.shape[0]


def row_groups(x: Tensor) -> Iterator[slice]:
    """Rows that are processed together.

    Rows drop different tokens. On a CPU each is processed alone and skips exactly what it dropped;
    on an accelerator all are processed together and skip what all of them dropped.
    """
    size = group_size(x)
    for start in range(0, x.shape[0], size):
        yield slice(start, start + size)


def alive_keys(alive: Tensor) -> Tensor | None:
    """The indices of the keys alive in some row of alive (B, S); None if all are."""
    any_row = alive.any(dim=0)
    return None if bool(any_row.all()) else any_row.nonzero().squeeze(-1)


def take(x: Tensor, keys: Tensor | None, stop: int, dim: int) -> Tensor:
    """Those keys of x along dim, or all before stop: then a view."""
    return x.narrow(dim, 0, stop) if keys is None else x.index_select(dim, keys)


def give(x: Tensor, keys: Tensor | None, stop: int, dim: int, update: Tensor) -> None:
    """The adjoint of take: add the update to those keys of x, in place."""
    if keys is None:
        x.narrow(dim, 0, stop).add_(update)
    else:
        x.index_add_(dim, keys, update)


def group_heads(q: Tensor, kv_heads: int) -> Tensor:
    """(B, Hq, Q, D) → (B, Hkv, G·Q, D): query heads that share a key head become its queries."""
    B, H, Q, D = q.shape
    return q.reshape(B, kv_heads, H // kv_heads * Q, D)


def ungroup_heads(x: Tensor, heads: int) -> Tensor:
    """(B, Hkv, G·Q, N) → (B, Hq, Q, N), the inverse."""
    B, kv_heads, GQ, N = x.shape
    return x.reshape(B, heads, GQ * kv_heads // heads, N)


def at_least_float32(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def work_dtype(q: Tensor) -> torch.dtype:
    """The dtype of the matrix products: few CPUs multiply half precision faster than float32."""
    return torch.promote_types(q.dtype, torch.float32) if q.device.type == "cpu" else q.dtype


class Scratch:
    """Memory for one large product at a time, kept from block to block.

    Fresh memory costs a page fault every 4 KB, and leaves holes that add to the peak.
    """

    def __init__(self, q: Tensor, block: int):
        _, H, T, _ = q.shape
        # the largest at once: growing would hold the old and the new together
        self.memory = q.new_empty(group_size(q) * H * min(block, T) * T, dtype=work_dtype(q))

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b in float32 at least; valid until the next call. a: (B, H, M, K), b: (B, H, K, N)"""
        if a.dtype in (torch.float16, torch.bfloat16):
            return torch.matmul(a, b).float()
        B, H, M, _ = a.shape
        out = self.memory[: B * H * M * b.shape[-1]].view(B * H, M, -1)
        torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out)
        return out.view(B, H, M, -1)


def softmax_with_sinks_(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """The same in place of logits, for a backward pass written by hand."""
    if sinks is None:
        return torch.softmax(logits, dim=-1, out=logits)
    return logits.copy_(softmax_with_sinks(logits, sinks))


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """softmax over the keys of logits (B, Hkv, G·Q, S) and, if any, one sink per query head (Hq,).

    The sink takes weight but has no value, so its column is not returned.
    """
    if sinks is None:
        return torch.softmax(logits, dim=-1)
    B, kv_heads, GQ, S = logits.shape
    column = sinks.to(logits.dtype).view(1, kv_heads, -1, 1, 1)
    column = column.expand(B, -1, -1, GQ * kv_heads // len(sinks), 1).reshape(B, kv_heads, GQ, 1)
    return torch.softmax(torch.cat([logits, column], dim=-1), dim=-1)[..., :S]
