"""Dense attention as others compute it, and plainly."""

import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from on_gpu.race import Contestant


def plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(q·k / √D) v in float32, one row at a time: (B, Hq, T, D)."""
    group, outs = q.shape[1] // k.shape[1], []
    for one_q, one_k, one_v in zip(q.float(), k.float(), v.float(), strict=True):
        keys, values = (x.repeat_interleave(group, 0) for x in (one_k, one_v))
        logits = one_q @ keys.mT / q.shape[-1] ** 0.5
        if causal:
            future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
            logits = logits.masked_fill(future, -torch.inf)
        outs.append(logits.softmax(-1) @ values)
    return torch.stack(outs).to(q.dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Contestant]:
    """SDPA, its flash kernel and FlexAttention, which all must be what `plain` is."""
    ways = {"SDPA": sdpa, "flash attention": flash, "FlexAttention": flex(q, k, causal)}

    def want() -> Tensor:
        return plain(q, k, v, causal)

    return {name: Contestant(partial(way, q, k, v, causal), want) for name, way in ways.items()}


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v, causal)


def flex(q: Tensor, k: Tensor, causal: bool) -> Callable[[Tensor, Tensor, Tensor, bool], Tensor]:
    """Compiled on a GPU; on a CPU as it is, which is slow and takes no compiler."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
    mask = None
    if causal:
        T = q.shape[2]
        mask = create_block_mask(lambda b, h, i, j: j <= i, None, None, T, T, device=q.device)
    run = torch.compile(flex_attention) if q.is_cuda else flex_attention

    def call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        return run(q, k, v, block_mask=mask, enable_gqa=True)

    return call
