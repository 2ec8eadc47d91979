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
from kvprune.ops.attend.blocks import at_least_float32

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
    step, form = layer.drop_step[0], layer.form
    q, k, v, o, g = (
        at_least_float32(x.detach()[0])
        for x in (layer.query, layer.key, layer.value, layer.output, gradient)
    )
    group = len(q) // len(k)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)  # (Hq, T, D)
    logits = torch.matmul(q * form.scaling, k.transpose(1, 2))
    if form.softcap is not None:
        logits = (logits / form.softcap).tanh_() * form.softcap
    index = torch.arange(k.shape[1], device=q.device)
    past = index <= index[:, None]  # query × key
    visible = past & (index[:, None] < step)
    logits = logits.where(past, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top).exp_()
    total = (weights * visible).sum(-1, keepdim=True)
    if form.sinks is not None:
        total = total + (form.sinks.detach().float()[:, None, None] - top).exp()
    share = (weights / (weights + total)).where(past & ~visible, 0.0)  # w / (1 + w)
    with_output = torch.cat([g, (g * o).sum(-1, keepdim=True)], -1)
    sums = torch.matmul(share.transpose(1, 2), with_output)  # (Hq, T, D + 1)
    return ((sums[..., :-1] * v).sum(-1) - sums[..., -1]).sum(0)


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
