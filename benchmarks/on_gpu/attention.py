"""One layer's attention: a decode step, a prompt, a training step; ours against dense."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvprune.cache.storage import Storage
from kvprune.ops.attend.soft import soft_attention
from kvprune.ops.decode import NewToken, Votes
from kvprune.ops.decode import decode as decode_step
from kvprune.ops.form import AttentionForm
from kvprune.ops.gate import Gate
from kvprune.ops.hard import hard_attention
from kvprune.ops.keep.drop import drop_steps, kept_pairs
from kvprune.ops.timeline import make_timeline
from on_gpu.race import Contestant, Row, race
from on_gpu.sizes import Sizes
from on_gpu.theirs import dense, flash, plain, sdpa

# with scores of variance 1, one survivor in 200 is voted out
BETA = 2.58
# votes that are drawn beforehand: the same ones again would drop nothing
DRAWN = 64


def decode(device: torch.device, sizes: Sizes) -> list[Row]:
    """One new token for each row; `kvprune` votes, drops, attends and stores it."""
    model, rows = sizes.model, []
    for batch in sizes.rows:
        for context in sizes.contexts:
            shape = batch, model.key_heads, context, model.size
            try:
                k, v = (_draw(sizes, device, *shape) for _ in "kv")
                q = _draw(sizes, device, batch, model.heads, 1, model.size)
                contestants = {"kvprune": _ours(device, sizes, batch, context)}
            except torch.OutOfMemoryError:
                continue
            contestants |= dense(q, k, v, causal=False)
            case = f"{batch} × {context:,}"
            rows += race(device, sizes.rounds, "decode", case, contestants)
            del q, k, v, contestants
    return rows


def _ours(device: torch.device, sizes: Sizes, batch: int, context: int) -> Contestant:
    model, kept = sizes.model, round((1 - sizes.sparsity) * context)
    heads = batch, model.key_heads
    tables = []
    key, value = (_draw(sizes, device, *heads, kept, model.size) for _ in "kv")
    key_int = torch.randn(batch, kept, sizes.rank, device=device)
    token = torch.arange(context - kept, context, device=device).expand(batch, -1)
    for _ in range(2):
        table = Storage().new_table(
            *heads, model.size, model.size, sizes.rank, {}, sizes.dtype, device
        )
        table.push(key, value, key_int, token)
        tables.append(table)
    drawn = [torch.randn(2, batch, sizes.rank, device=device) for _ in range(DRAWN)]
    beta = torch.tensor(BETA, device=device)
    new = NewToken(
        _draw(sizes, device, batch, model.heads, 1, model.size),
        _draw(sizes, device, *heads, 1, model.size), _draw(sizes, device, *heads, 1, model.size),
        torch.full((batch,), context, device=device),
    )  # fmt: skip
    form, steps = AttentionForm(model.size**-0.5), [0]

    def step(table, backend: str | None, number: int) -> Tensor:
        q_int, k_int = drawn[number % DRAWN]
        votes = Votes(q_int / sizes.rank**0.5, k_int, beta)
        return decode_step(table, new, form, votes=votes, backend=backend).output

    def call() -> Tensor:
        steps[0] += 1
        return step(tables[0], None, steps[0] - 1)

    return Contestant(call, lambda: step(tables[1], "reference", 0))


def prefill(device: torch.device, sizes: Sizes) -> list[Row]:
    """A prompt: who is dropped when, and attention to what is alive."""
    model, rows = sizes.model, []
    form = AttentionForm(model.size**-0.5)
    for length in sizes.prompts:
        q, k, v = (
            _draw(sizes, device, 1, h, length, model.size)
            for h in (model.heads, model.key_heads, model.key_heads)
        )
        q_int, k_int = (torch.randn(1, length, sizes.rank, device=device) for _ in "qk")
        q_int = q_int / sizes.rank**0.5
        timeline = make_timeline(None, (1, length), device)
        beta = _aimed(q_int, k_int, timeline, sizes.sparsity)

        reading = partial(_read, (q, k, v), (q_int, k_int, beta), timeline, form)
        contestants = {"kvprune": Contestant(partial(reading, None), partial(reading, "reference"))}
        contestants |= dense(q, k, v, causal=True)
        rows += race(device, sizes.rounds, "prefill", f"1 × {length:,}", contestants)
    return rows


def _read(given, votes, timeline, form: AttentionForm, backend: str | None) -> Tensor:
    """The reference computes in float32, from the same numbers."""
    (q, k, v), (q_int, k_int, beta) = given, votes
    steps = drop_steps(q_int, k_int, beta, timeline, backend=backend)
    if backend is None:
        return hard_attention(q, k, v, steps, form)
    return hard_attention(q.float(), k.float(), v.float(), steps, form, backend).to(q.dtype)


def train(device: torch.device, sizes: Sizes) -> list[Row]:
    """Forward and backward; at α = 1.5 with β = 2, where a run starts, and with most keys gone."""
    rows = []
    for batch, length in sizes.texts:
        contestants = {}
        for name, spread in (("kvprune, start", 0.3), ("kvprune, pruned", 1.5)):
            contestants[name] = Contestant(
                soft(device, sizes, batch, length, spread),
                soft(device, sizes, batch, length, spread, "reference"),
            )
        for name, way in (("SDPA", sdpa), ("flash attention", flash)):
            contestants[name] = Contestant(
                learns(device, sizes, batch, length, way), learns(device, sizes, batch, length)
            )
        case = f"{batch} × {length:,}"
        with torch.enable_grad():
            rows += race(device, sizes.rounds, "train", case, contestants)
    return rows


def soft(
    device: torch.device, sizes: Sizes, batch: int, length: int, spread: float,
    backend: str | None = None,
) -> Callable[[], Tensor]:  # fmt: skip
    """A training step of one layer; the gradients of what votes are made of."""
    q, k, v = _leaves(device, sizes, batch, length)
    torch.manual_seed(1)
    q_int, k_int = (
        (spread * torch.randn(batch, length, sizes.rank, device=device)).requires_grad_()
        for _ in "qk"
    )
    beta = torch.tensor(2.0, device=device, requires_grad=True)
    timeline = make_timeline(None, (batch, length), device)
    form, gate = AttentionForm(sizes.model.size**-0.5), Gate("alpha", 1.5)

    def call() -> Tensor:
        out, kept = soft_attention(
            q, k, v, [(q_int / sizes.rank**0.5, k_int, beta)], timeline, gate, form, backend=backend
        )
        loss = out.float().pow(2).mean() + 0.3 * kept.sum() / timeline.pairs().sum()
        return torch.autograd.grad(loss, [q, k, v, q_int, k_int])[3]

    return call


def learns(
    device: torch.device, sizes: Sizes, batch: int, length: int, way: Callable[..., Tensor] = plain
) -> Callable[[], Tensor]:
    """A training step of dense attention; the gradient of its queries."""
    q, k, v = _leaves(device, sizes, batch, length)

    def call() -> Tensor:
        loss = way(q, k, v, True).float().pow(2).mean()
        return torch.autograd.grad(loss, [q, k, v])[0]

    return call


def _leaves(device: torch.device, sizes: Sizes, batch: int, length: int) -> list[Tensor]:
    model = sizes.model
    torch.manual_seed(0)
    return [
        _draw(sizes, device, batch, h, length, model.size).requires_grad_()
        for h in (model.heads, model.key_heads, model.key_heads)
    ]


def _aimed(q_int: Tensor, k_int: Tensor, timeline, sparsity: float) -> Tensor:
    """β at which this share of the pairs is dropped."""
    low, high = 0.0, 8.0
    for _ in range(12):
        beta = torch.tensor((low + high) / 2, device=q_int.device)
        kept = kept_pairs(drop_steps(q_int, k_int, beta, timeline), timeline)
        dropped = 1 - float(kept.sum() / timeline.pairs().sum())
        low, high = (float(beta), high) if dropped > sparsity else (low, float(beta))
    return beta


def _draw(sizes: Sizes, device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device=device, dtype=sizes.dtype)
