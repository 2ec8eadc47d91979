"""A first look: a small model, made on the spot, with its gates open and closed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvprune.config import PruningConfig
from kvprune.ops.timeline import NEVER
from kvprune.pruned import Pruned, attach

TEXTS = [
    "The old lighthouse keeper climbed the stairs at dusk.",
    "Water boils sooner on a mountain than by the sea.",
    "A cache that forgets is a cache that fits.",
]
RANK = 16


@dataclass(frozen=True)
class Row:
    """A batch read at one β."""

    beta: float
    sparsity: float
    per_layer: list[float]
    cache_bytes: int
    dense_bytes: int


@dataclass(frozen=True)
class Run:
    """All that the demo shows."""

    model: str
    texts: int
    open_difference: float
    detached_difference: float
    rows: list[Row]
    text: str
    shown_beta: float
    kept: list[list[bool]]  # layer × letter of the text: held at its end


def run(seed: int = 0) -> Run:
    """Read a left-padded batch of texts with open and with ever more closed gates."""
    model = small_model(seed)
    ids, mask = text_ids(TEXTS)
    with torch.no_grad():
        dense = model(ids, attention_mask=mask).logits
        pruned = attach(model, PruningConfig(rank=RANK, beta=1000.0))
        opened = model(ids, attention_mask=mask).logits
        rows = [_read(pruned, ids, mask, beta) for beta in (1000.0, 3.0, 2.0, 1.5, 1.0)]
        _set_beta(pruned, shown := 1.5)
        length = len(TEXTS[0])
        steps = pruned.trace(ids[:1, -length:])[:, 0]  # (L, T)
        pruned.detach()
        detached = model(ids, attention_mask=mask).logits
    real = mask.bool()
    return Run(
        model="GPT-2 of 4 layers, width 128",
        texts=len(TEXTS),
        open_difference=float((opened - dense)[real].abs().max()),
        detached_difference=float((detached - dense)[real].abs().max()),
        rows=rows,
        text=TEXTS[0],
        shown_beta=shown,
        kept=(steps == NEVER).tolist(),
    )


def small_model(seed: int) -> GPT2LMHeadModel:
    """A GPT-2 that reads bytes, with random weights."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=256, n_embd=128, n_layer=4, n_head=4, n_positions=256,
        bos_token_id=0, eos_token_id=0, initializer_range=0.1,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def text_ids(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts as their bytes, padded on the left: ids and mask, (B, T)."""
    rows = [list(text.encode()) for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    return ids, (ids > 0).long()


def _set_beta(pruned: Pruned, beta: float) -> None:
    for layer in pruned.layers:
        assert layer.interaction is not None
        layer.interaction.beta.fill_(beta)


def _read(pruned: Pruned, ids: torch.Tensor, mask: torch.Tensor, beta: float) -> Row:
    _set_beta(pruned, beta)
    steps = pruned.trace(ids, mask)
    share = pruned.sparsity()
    config = pruned.model.config
    keys_and_values, interaction_key = 2 * config.hidden_size * 4, RANK * 4  # float32
    tokens = int(mask.sum()) * len(pruned.layers)
    return Row(
        beta=beta,
        sparsity=share.total,
        per_layer=share.per_layer.tolist(),
        cache_bytes=int((steps == NEVER).sum()) * (keys_and_values + interaction_key),
        dense_bytes=tokens * keys_and_values,
    )
