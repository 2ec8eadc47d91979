"""Small inputs for each operation, and how far a backend is from the reference on them.

Widths are those of real models, so that the kernels are those that will run; the numbers are drawn
on the CPU, so that they are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvprune.cache.arena import Arena
from kvprune.cache.extents import ExtentTable
from kvprune.ops.attend.soft import soft_attention
from kvprune.ops.decode import REMOVE, NewToken, Votes
from kvprune.ops.decode import decode as decode_step
from kvprune.ops.dispatch import REFERENCE, Operation
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.hard import HARD_ATTENTION
from kvprune.ops.int8 import QUANTISE
from kvprune.ops.keep import LOG_KEEP, LOG_KEEP_BACKWARD
from kvprune.ops.keep.drop import DROP_STEPS
from kvprune.ops.linear import LINEAR
from kvprune.ops.never import NEVER
from kvprune.ops.norm import RMS_NORM
from kvprune.ops.swiglu import SWIGLU
from kvprune.ops.timeline import make_timeline

# the largest difference between two results; inf where they differ in kind
Error = float
CPU = torch.device("cpu")
ROWS, HEADS, GROUP, SIZE, RANK, STEPS = 3, 2, 2, 64, 64, 40
TIE = 1e-4
TOKENS = 150  # more than a block of queries, and no multiple of it


def decode(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    """Forty tokens one after the other; about a third of what is held leaves meanwhile."""
    (got, left), (want, left_too) = (
        _steps(*place, dtype) for place in ((backend, device), (REFERENCE, CPU))
    )
    return difference(got, want) if left == left_too else math.inf


def _steps(backend: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, list[set[int]]]:
    table, draw = _table(dtype, device), _draw()
    outs, members = [], []
    for step in range(STEPS):
        heads = (ROWS, HEADS, 1, SIZE)
        query, key, value = (draw(ROWS, HEADS * GROUP, 1, SIZE), draw(*heads), draw(*heads))
        query, key, value = (x.to(device, table.layout.dtype) for x in (query, key, value))
        q_int, k_int = draw(ROWS, RANK) / RANK**0.5, draw(ROWS, RANK)
        number = torch.full((ROWS,), step, device=device)
        votes = Votes(q_int.to(device), k_int.to(device), torch.tensor(1.8, device=device))
        form = AttentionForm(SIZE**-0.5)
        done = decode_step(
            table, NewToken(query, key, value, number), form, votes=votes, backend=backend
        )
        outs.append(done.output.cpu().float())
        members.append(_members(table))
    return torch.stack(outs), [row for step in members for row in step]


def remove(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    """Two thirds of a table's tokens leave; what stays is compared by token number."""
    sides = []
    for name, place in ((backend, device), (REFERENCE, CPU)):
        table, draw = _table(dtype, place), _draw()
        key, value = (draw(ROWS, HEADS, TOKENS, SIZE).to(place, table.layout.dtype) for _ in "kv")
        token = torch.arange(TOKENS, device=place).expand(ROWS, -1)
        table.push(key, value, draw(ROWS, TOKENS, RANK).to(place), token)
        leaves = (draw(ROWS, TOKENS) < 0.4).to(place)
        REMOVE.implementation(table.stored, name)(table, leaves)
        slots = table.get()
        order = slots.token.where(slots.valid, NEVER).argsort(1)
        held = (
            slots.keys.cpu()
            .float()
            .gather(2, order.cpu()[:, None, :, None].expand(-1, HEADS, -1, SIZE))
        )
        sides.append((held, _members(table)))
    (got, members), (want, members_too) = sides
    return difference(got, want) if members == members_too else math.inf


def drop_steps(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    draw, beta = _draw(), torch.tensor(2.0)
    q_int, k_int = draw(ROWS, TOKENS, RANK) / RANK**0.5, draw(ROWS, TOKENS, RANK)
    # a sum in another order puts a score this close on the other side: such queries have no vote
    scores = q_int.double() @ k_int.double().mT + beta.double()
    tied = (scores.abs() < TIE).any(-1, keepdim=True)
    votes = q_int.masked_fill(tied, 0.0), k_int, beta

    def run(name: str, place: torch.device) -> Tensor:
        timeline = make_timeline(None, (ROWS, TOKENS), place)
        q_int, k_int, beta = (x.to(place, dtype) for x in votes)
        return DROP_STEPS.implementation(q_int, name)(q_int, k_int, beta, timeline)

    return difference(run(backend, device), run(REFERENCE, CPU))


def hard_attention(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    draw = _draw()
    q, k, v = (draw(ROWS, h, TOKENS, SIZE).to(dtype) for h in (HEADS * GROUP, HEADS, HEADS))
    life = (draw(ROWS, TOKENS).abs() * 30).long() + 1
    steps = torch.arange(TOKENS) + life
    steps = steps.where(draw(ROWS, TOKENS) < 1, NEVER)
    form = AttentionForm(SIZE**-0.5)
    got = _run(HARD_ATTENTION, backend, device, q, k, v, steps, form)
    return difference(got, _run(HARD_ATTENTION, REFERENCE, CPU, *_wide(q, k, v), steps, form))


def soft_forward(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    """A training step's attention, and how much it keeps."""
    (got, kept), _ = _soft(backend, dtype, device)
    (want, kept_too), _ = _soft(REFERENCE, dtype, CPU)
    return max(difference(got, want), difference(kept / TOKENS, kept_too / TOKENS))


def soft_backward(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    """Its gradients: those of queries, keys, values, and of what votes are made of."""
    _, got = _soft(backend, dtype, device)
    _, want = _soft(REFERENCE, dtype, CPU)
    return max(difference(a, b) for a, b in zip(got, want, strict=True))


def _soft(
    backend: str, dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """The reference computes in float32, from the same numbers."""
    draw, wide = _draw(), backend == REFERENCE and device == CPU

    def leaf(x: Tensor) -> Tensor:
        return x.to(device).requires_grad_()

    states = [draw(ROWS, h, TOKENS, SIZE).to(dtype) for h in (HEADS * GROUP, HEADS, HEADS)]
    q, k, v = (leaf(x.float() if wide else x) for x in states)
    q_int, k_int = leaf(draw(ROWS, TOKENS, RANK) / RANK**0.5), leaf(draw(ROWS, TOKENS, RANK))
    beta = leaf(torch.tensor(2.0))
    time = make_timeline(None, (ROWS, TOKENS), device)
    form, gate = AttentionForm(SIZE**-0.5), Gate("alpha", 1.5)
    with torch.enable_grad():
        out, kept = soft_attention(
            q, k, v, [(q_int, k_int, beta)], time, gate, form, backend=backend
        )
        loss = (out.float() * draw(*out.shape).to(device)).sum() + kept.sum()
        grads = torch.autograd.grad(loss / TOKENS, [q, k, v, q_int, k_int, beta])
    return (out.detach(), kept.detach()), grads


def linear(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    draw = _draw()
    given = draw(3, 576).to(dtype), (draw(130, 576) / 24).to(dtype), draw(130).to(dtype)
    return _compare(LINEAR, backend, device, given)


def rms_norm(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    draw = _draw()
    return _compare(RMS_NORM, backend, device, (draw(5, 576).to(dtype), draw(576).to(dtype)), 1e-5)


def swiglu(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    draw = _draw()
    return _compare(SWIGLU, backend, device, (draw(5, 1536).to(dtype), draw(5, 1536).to(dtype)))


def quantise(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    x = _draw()(50, HEADS, SIZE).to(dtype)
    got, want = _run(QUANTISE, backend, device, x), _run(QUANTISE, REFERENCE, CPU, x)
    return max(difference(a, b) for a, b in zip(got, want, strict=True))


def gate(operation: Operation[Any, Any]) -> Callable[[str, torch.dtype, torch.device], Error]:
    def error(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
        x = torch.linspace(-6, 6, 4001, dtype=dtype)
        return max(
            difference(_run(operation, backend, device, x, alpha),
                       _run(operation, REFERENCE, CPU, x.double(), alpha))
            for alpha in (1.0, 1.5, 4.0)
        )  # fmt: skip

    return error


def log_keep(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    scores, carry, _ = _gated(dtype)

    def run(name: str, place: torch.device) -> tuple[Tensor, Tensor]:
        time = make_timeline(None, (ROWS, TOKENS), place)
        own = scores.to(place)
        return LOG_KEEP.implementation(own, name)(own, carry.to(place), time, Gate("alpha", 1.5))

    # what is left of each key: logs of nearly nothing differ by more than anybody sees
    pairs = zip(run(backend, device), run(REFERENCE, CPU), strict=True)
    return max(difference(got.exp(), want.exp()) for got, want in pairs)


def log_keep_backward(backend: str, dtype: torch.dtype, device: torch.device) -> Error:
    scores, carry, upstream = _gated(dtype)

    def run(name: str, place: torch.device) -> tuple[Tensor, Tensor]:
        time = make_timeline(None, (ROWS, TOKENS), place)
        grad, own, after = (x.to(place) for x in (upstream, scores, carry))
        backward = LOG_KEEP_BACKWARD.implementation(own, name)
        return backward(grad, own, after, time, Gate("alpha", 1.5))

    pairs = zip(run(backend, device), run(REFERENCE, CPU), strict=True)
    return max(difference(got, want) for got, want in pairs)


def difference(got: Tensor, want: Tensor) -> Error:
    """The largest of |got − want| / (1 + |want|).

    Infinities on both sides are equal; a NaN is never close.
    """
    got, want = got.detach().cpu(), want.detach().cpu()
    if got.shape != want.shape:
        return math.inf
    got, want = got.double(), want.double()
    gap = ((got - want).abs() / (1 + want.abs())).where(got != want, 0.0)
    return float(gap.max()) if gap.numel() else 0.0


def _compare(
    operation: Operation[Any, Any], backend: str, device: torch.device,
    given: tuple[Tensor, ...], *more: Any,
) -> Error:  # fmt: skip
    """Against the reference on the same numbers in float32."""
    got = _run(operation, backend, device, *given, *more)
    return difference(got, _run(operation, REFERENCE, CPU, *_wide(*given), *more))


def _run(operation: Operation[Any, Any], backend: str, device: torch.device, *given: Any) -> Any:
    own = [x.to(device) if isinstance(x, Tensor) else x for x in given]
    return operation.implementation(own[0], backend)(*own)


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.float() for x in tensors)


def _gated(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, carries and gradients of a block of queries that is a whole short text."""
    draw = _draw()
    scores = draw(ROWS, TOKENS, TOKENS) * 0.5 + 2
    # no vote falls on the kink of the gate, where its slope jumps
    scores = scores.where((scores - 2).abs() > 1e-3, 2.01)
    carry, upstream = -draw(ROWS, TOKENS).abs(), draw(ROWS, TOKENS, TOKENS).tril() / TOKENS
    return scores.to(dtype), carry.to(dtype), upstream.to(dtype)


def _table(dtype: torch.dtype, device: torch.device) -> ExtentTable:
    model, kv = (torch.float32, "int8") if dtype is torch.int8 else (dtype, None)
    return ExtentTable(
        ROWS, HEADS, SIZE, rank=RANK, dtype=model, kv=kv, arena=Arena(device, shared=False)
    )


def _members(table: ExtentTable) -> list[set[int]]:
    token, valid = (x.cpu() for x in table.members())
    return [set(row[own].tolist()) for row, own in zip(token, valid, strict=True)]


def _draw() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)
