"""How much each dropped token was missed, for all of them at once: one backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvprune.explain.replay import last_logits, recorded, row
from kvprune.integration.forward_pass import Observed
from kvprune.ops.attend.blocks import at_least_float32, group_heads, softmax_with_sinks

if TYPE_CHECKING:
    from kvprune.integration.handle import Pruned


def estimated_change(
    pruned: Pruned, ids: Sequence[int], drop_step: np.ndarray, target: int
) -> np.ndarray:
    """By how much the target's loss would change with each dropped token back: (L, T).

    One backward pass. In the layer of its return the change of the attention output is exact,
    w = exp(s[k, j]) / Σ_visible exp(s[k, i]):  o'[k] − o[k] = w / (1 + w) · (v[j] − o[k]);
    what it does to the loss above is first order. 0 where nothing was dropped before the target.
    """
    seen: list[Observed] = []
    method = recorded(pruned, drop_step)
    inside = (pruned.evaluating(), pruned.following(method), pruned.observing(seen.append))
    with torch.inference_mode(False), torch.enable_grad(), _from_embeddings(pruned):
        with inside[0], inside[1], inside[2]:
            logits = last_logits(pruned, row(pruned, ids[:target]))
        loss = -logits.float().log_softmax(-1)[ids[target]]
        gradients = torch.autograd.grad(loss, [layer.output for layer in seen], allow_unused=True)
    estimate = np.zeros((len(seen), len(ids)), dtype=np.float32)
    with torch.no_grad():
        for layer, gradient in zip(seen, gradients, strict=True):
            # the last layer's output matters only for the last token, and may be unused before
            if gradient is not None:
                estimate[layer.layer, :target] = _by_key(layer, gradient).cpu().numpy()
    return estimate


def _by_key(layer: Observed, gradient: Tensor) -> Tensor:
    """Σ over heads and queries of the gradient × the change of the output, per key: (T,)."""
    q, k, v, step = layer.query.detach(), layer.key.detach(), layer.value.detach(), layer.drop_step
    T, heads = k.shape[2], k.shape[1]
    scaled = group_heads(q * layer.form.scaling, heads)
    logits = at_least_float32(torch.matmul(scaled, k.transpose(2, 3)))  # (1, H, G·T, T)
    if layer.form.softcap is not None:
        logits = (logits / layer.form.softcap).tanh() * layer.form.softcap
    index = torch.arange(T, device=q.device)
    past, gone = index <= index[:, None], index[:, None] >= step[0]  # query × key
    repeat = q.shape[1] // heads
    visible, dropped = (past & ~gone).repeat(repeat, 1), (past & gone).repeat(repeat, 1)
    masked = logits.where(visible, -torch.inf)
    # the softmax over what is visible gives its normaliser: log Σ exp = logit − log weight
    top = masked.argmax(-1, keepdim=True)
    weight = softmax_with_sinks(masked, layer.form.sinks).gather(-1, top)
    normaliser = logits.gather(-1, top) - weight.log()
    share = torch.sigmoid(logits - normaliser).where(dropped, 0.0)  # w / (1 + w)
    g, o = group_heads(gradient, heads).float(), group_heads(layer.output.detach(), heads).float()
    gain = torch.matmul(g, v.float().transpose(2, 3)) - (g * o).sum(-1, keepdim=True)
    return (share * gain).sum(dim=(0, 1, 2))


@contextmanager
def _from_embeddings(pruned: Pruned) -> Iterator[None]:
    """Gradients flow from the embeddings on, and to no weight."""
    flags = [(p, p.requires_grad) for p in pruned.model.parameters()]
    embeddings: Any = pruned.model.get_input_embeddings()
    handle = embeddings.register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        for parameter, _ in flags:
            parameter.requires_grad_(False)
        yield
    finally:
        handle.remove()
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
