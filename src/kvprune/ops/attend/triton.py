"""Soft pruned attention by Triton's kernels: a stripe of queries at a time.

For each stripe `triton_keep` writes log keep as tiles, once for all heads, and `triton_forward`
attends over those that are alive. The backward pass takes the stripes in reverse and makes the
tiles again. Memory: carries of 4·B·T²/stripe bytes from one pass to the other, and while it runs
two workspaces of 64 MB at most. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvprune.ops.alpha_sigmoid.triton import DeviceGate, device_gate
from kvprune.ops.attend.options import Forward, Options
from kvprune.ops.attend.triton_backward import keys_backward, log_keep_grad, queries_backward
from kvprune.ops.attend.triton_forward import attend
from kvprune.ops.attend.triton_keep import log_keep
from kvprune.ops.attend.triton_tiles import Tiles, padded, stripe, tiles_for
from kvprune.ops.attend.triton_votes import queries_int_backward, votes_backward
from kvprune.ops.gpu import cdiv, on_its_device


@on_its_device
def soft_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    flat: Sequence[Tensor],
    options: Options,
) -> Forward:
    """See reference.soft_forward; the carries are those of stripes."""
    call = _Call(q, k, v, sinks, flat, options)
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    stripes = list(call.stripes())
    carries = flat[0].new_zeros(len(stripes), call.layers, call.B, call.T)
    keep_sum = flat[0].new_zeros(call.B)
    bias = call.workspace()
    for number, part in enumerate(stripes):
        after = carries[number + 1] if number + 1 < len(stripes) else torch.empty_like(carries[0])
        alive, sums = call.log_keep(part, carries[number], after, bias)
        keep_sum += sums
        attend[(part.query_blocks, call.B * call.heads)](
            call.q, call.k, call.v, call.sinks, bias, alive, out, lse, call.T, *part,
            *call.form_numbers, SINKS=sinks is not None, **call.form, **call.shape,
            **call.tiles.options(),
        )  # fmt: skip
    return Forward(out, keep_sum, carries, lse)


@on_its_device
def soft_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    flat: Sequence[Tensor],
    done: Forward,
    grad_out: Tensor,
    grad_keep_sum: Tensor,
    options: Options,
) -> tuple[Tensor | None, ...]:
    """See reference.soft_backward."""
    call = _Call(q, k, v, sinks, flat, options)
    grad_out, grad_keep_sum = grad_out.contiguous(), grad_keep_sum.contiguous()
    delta = (done.out.float() * grad_out.float()).sum(-1)
    grad_q = torch.empty_like(call.q)
    # added to by every stripe
    grad_k, grad_v = (torch.zeros_like(x, dtype=torch.float32) for x in (call.k, call.v))
    votes = [_VoteGrads(call, layer) for layer in range(call.layers)]
    bias, grad_bias = call.workspace(), call.workspace()
    given = call.q, call.k, call.v, grad_out, done.lse, delta, bias
    constants = {**call.form, **call.shape, **call.tiles.options()}
    after = torch.empty_like(done.carries[0])
    for number, part in reversed(list(enumerate(call.stripes()))):
        alive, _ = call.log_keep(part, done.carries[number], after, bias)
        rest = (call.T, *part, *call.form_numbers)
        queries_backward[(part.query_blocks, call.B * call.heads)](
            *given, alive, grad_q, *rest, **constants
        )
        keys_backward[(part.key_blocks, call.B * call.kv_heads)](
            *given, alive, grad_k, grad_v, *rest, **constants
        )
        log_keep_grad[(part.query_blocks * part.key_blocks, call.B)](
            *given, alive, grad_keep_sum, grad_bias, *rest, **constants
        )
        # nobody needs log keep any more: the gradients of the scores take its place
        for layer in votes:
            layer.add(part, alive, grad_bias, bias)
    grad_sinks = None
    if sinks is not None:
        # the softmax's gradients sum to 0 over the keys and the sink
        share = (sinks.float()[:, None] - done.lse).exp()
        grad_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
    flat_grads = [grad for layer in votes for grad in layer.grads()]
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks, *flat_grads


class _Stripe(NamedTuple):
    """In the order in which the kernels take it."""

    first: int  # number of its first block
    query_blocks: int
    key_blocks: int  # up to its last query's


class _Call:
    """The tensors of a call as the kernels want them."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        flat: Sequence[Tensor],
        options: Options,
    ):
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), v.contiguous()
        self.sinks = q if sinks is None else sinks.contiguous()
        self.votes = [
            tuple(x.contiguous() for x in flat[i : i + 3]) for i in range(0, len(flat), 3)
        ]
        self.layers, self.R = len(self.votes), flat[0].shape[-1]
        (self.B, self.heads, self.T, D), V = q.shape, v.shape[-1]
        self.kv_heads = k.shape[1]
        time = options.timeline
        self.clock, self.visible_from, self.votable_from = (
            x.contiguous() for x in (time.clock, time.visible_from, time.votable_from)
        )
        self.gate: DeviceGate = device_gate(options.gate, q.device)
        self.tiles: Tiles = tiles_for(q, v, flat[0])
        form = options.form
        self.form_numbers = (form.scaling, form.softcap or 1.0, form.dropout, options.seed)
        self.form = {"CAP": form.softcap is not None, "DROPOUT": form.dropout > 0}
        self.shape = {
            "HEADS": self.heads, "GROUP": self.heads // self.kv_heads, "D": D,
            "PADDED_D": padded(D), "V": V, "PADDED_V": padded(V),
        }  # fmt: skip
        self.vote_shape: dict[str, Any] = {
            "R": self.R, "PADDED_R": padded(self.R), **self.tiles.options()
        }  # fmt: skip

    def stripes(self) -> Iterator[_Stripe]:
        block = self.tiles.block
        size, blocks = stripe(self.B, self.T, block) // block, cdiv(self.T, block)
        for first in range(0, blocks, size):
            stop = min(first + size, blocks)
            yield _Stripe(first, stop - first, stop)

    def workspace(self) -> Tensor:
        """Memory for the tiles of a stripe."""
        block = self.tiles.block
        columns = cdiv(self.T, block) * block
        return self.q.new_empty(
            self.B * stripe(self.B, self.T, block) * columns, dtype=torch.float32
        )

    def log_keep(
        self, part: _Stripe, carry: Tensor, after: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fills the tiles and the carry after them: which are alive, and the sum of keep (B,)."""
        size = self.B * part.query_blocks * part.key_blocks
        alive = torch.zeros(size, dtype=torch.int32, device=bias.device)
        sums = bias.new_empty(self.B, part.key_blocks)
        for layer, votes in enumerate(self.votes):
            log_keep[(part.key_blocks, self.B)](
                *votes, self.clock, self.visible_from, self.votable_from, carry[layer],
                after[layer], bias, alive, sums, self.gate.numbers, self.T, *part,
                ADD=layer > 0, KIND=self.gate.kind, **self.vote_shape,
            )  # fmt: skip
        return alive, sums.sum(-1)


class _VoteGrads:
    """The gradients of one layer of votes, added up over the stripes."""

    def __init__(self, call: _Call, layer: int):
        self.call, self.votes = call, call.votes[layer]
        q_int, k_int, self.beta = self.votes
        self.grad_q, self.grad_k = torch.empty_like(q_int), torch.zeros_like(k_int)
        self.carry = q_int.new_zeros(call.B, call.T)
        blocks = cdiv(call.T, call.tiles.block)
        self.grad_beta = q_int.new_zeros(call.B, blocks)

    def add(self, part: _Stripe, alive: Tensor, grad_bias: Tensor, grad_scores: Tensor) -> None:
        call = self.call
        votes_backward[(part.key_blocks, call.B)](
            *self.votes, call.clock, call.votable_from, grad_bias, alive, self.carry,
            grad_scores, self.grad_k, self.grad_beta, call.gate.numbers, call.T, *part,
            KIND=call.gate.kind, **call.vote_shape,
        )  # fmt: skip
        queries_int_backward[(part.query_blocks, call.B)](
            self.votes[1], alive, grad_scores, self.grad_q, call.T, *part, **call.vote_shape
        )

    def grads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.grad_q, self.grad_k, self.grad_beta.sum().reshape(self.beta.shape)
