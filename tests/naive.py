"""A complete model pruned the plain way: n × n matrices, keys repeated for every query head.

Shares nothing with the package but the interaction weights: its own attention function, hooks
and mask, so that equal logits test all of the package's.
"""

import math
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "naive_pruning"


def log_gate(scores: Tensor, alpha: float) -> Tensor:
    """The gate of the paper at the values of α that have closed forms."""
    if alpha == 1:
        return scores.sigmoid().log()
    if alpha == 2:
        return ((1 + scores) / 2).clamp(0, 1).log()
    if alpha == 3:
        return (0.5 + scores).clamp(0, 1).log()
    assert alpha == math.inf
    return (scores > 0).to(scores.dtype).log()


@contextmanager
def naive_pruning(model, interactions: dict[str, dict[str, Tensor]], real: Tensor, alpha: float):
    """`interactions`: attention module's name → its "query.weight", "key.weight", "beta"."""
    modules = {model.get_submodule(name): weights for name, weights in interactions.items()}
    seen = {}

    def remember(module, args, kwargs):
        seen[module] = kwargs.get("hidden_states", args[0] if args else None)

    def attention(
        module, q, k, v, mask, scaling=None, dropout=0.0, softcap=None, s_aux=None, **kwargs
    ):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if module in modules:
            weights, x = modules[module], seen[module]
            r = weights["query.weight"].shape[0]
            scores = (x @ weights["query.weight"].T) @ (x @ weights["key.weight"].T).mT
            votes = log_gate(scores / math.sqrt(r) + weights["beta"], alpha)
            T = q.shape[2]
            past = torch.ones(T, T, dtype=torch.bool).tril(-1)
            votes = votes.where(past & real[:, :, None], 0.0)
            logits = logits + votes.cumsum(1)[:, None]
        logits = logits.where(mask, -torch.inf)
        if s_aux is not None:
            sink = s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sink], -1)
        weights = torch.softmax(logits, -1)[..., : k.shape[2]].nan_to_num()
        return (weights @ v).transpose(1, 2).contiguous(), None

    def mask(**kwargs):
        square = sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})
        return square.expand(real.shape[0], *square.shape[1:])

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    before = model.config._attn_implementation
    hooks = [m.register_forward_pre_hook(remember, with_kwargs=True) for m in modules]
    model.config._attn_implementation_internal = NAME
    try:
        yield model
    finally:
        model.config._attn_implementation_internal = before
        for hook in hooks:
            hook.remove()


@contextmanager
def masked_attention(model, drop_step: dict[str, Tensor], look=lambda name, q, k: None):
    """Dense attention in which query k of a layer sees key j iff j ≤ k < drop_step[j].

    drop_step: attention module's name → (B, T); a layer that is not named drops nothing. `look` is
    called with a module's name, its queries and its keys. No padding.
    """
    names = {module: name for name, module in model.named_modules()}

    def attention(module, q, k, v, mask, scaling=None, softcap=None, **kwargs):
        look(names[module], q, k)
        groups, T = q.shape[1] // k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        logits = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        steps = drop_step.get(names[module])
        if steps is not None:
            mask = mask & (torch.arange(T)[:, None] < steps[:, None, None, :T])
        weights = torch.softmax(logits.where(mask, -torch.inf), -1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    def causal_mask(**kwargs):
        return sdpa_mask(**{**kwargs, "allow_is_causal_skip": False})

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, causal_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation_internal = NAME
    try:
        yield model
    finally:
        model.config._attn_implementation_internal = before
