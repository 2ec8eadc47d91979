"""Merging tokens by the similarity of their keys, without fine-tuning: does perplexity diverge?

    python -m experiments.merging             writes docs/results/merging.json and a figure

The paper tried the token merging of Bolya et al. (2023), made for encoders, on a decoder and saw
perplexity rise at once. Here: each layer's cache may hold a share of the tokens read; beyond that,
the two entries whose keys are most alike (cosine, mean over heads; one from the even slots,
one from the odd) become their mean, weighted by how many tokens each stands for, and attention
counts an entry by that number. Compared with the pruned models of tiny_curve.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from experiments import small
from experiments.publish import publish, save_figure
from kvprune import PruningConfig, tiny
from kvprune.utils import plot

SHARES = (0.0, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)  # of the context that is merged away
WINDOWS = 16


def main() -> None:
    args = small.arguments(__doc__).parse_args()
    text = small.held_out()[: WINDOWS * small.LENGTH].view(WINDOWS, small.LENGTH)
    rows: list[dict[str, Any]] = []
    for share in SHARES:
        loss = merged_loss(tiny.load_model(), text, share)
        rows.append({"method": "merging", "sparsity": share, "perplexity": float(loss.exp())})
        print(rows[-1], flush=True)
    runs = small.Runs(args.runs)
    for gamma in (0.03, 0.1, 0.3, 1.0):
        context, sparsity, perplexity = runs.record(PruningConfig(rank=small.RANK), gamma=gamma)[
            "contexts"
        ][-1]
        assert context == "all"
        rows.append({"method": "pruning", "sparsity": sparsity, "perplexity": perplexity})
    publish("merging", {"windows": WINDOWS, "length": small.LENGTH}, rows)
    draw(rows)


@torch.no_grad()
def merged_loss(model: PreTrainedModel, ids: Tensor, share: float) -> Tensor:
    """Mean next-token loss of rows (B, T), read token by token: slow and simple."""
    AttentionInterface.register("merged", attend)
    model.set_attn_implementation("merged")
    layers = model.transformer.h
    cache, losses = DynamicCache(), []
    for layer in layers:
        layer.attn.sizes = torch.ones(len(ids), 0)
    for t in range(ids.shape[1] - 1):
        for layer in layers:
            layer.attn.sizes = F.pad(layer.attn.sizes, (0, 1), value=1.0)
        position = torch.full((len(ids), 1), t)
        logits = model(ids[:, t : t + 1], past_key_values=cache, position_ids=position).logits
        losses.append(F.cross_entropy(logits[:, -1], ids[:, t + 1], reduction="none"))
        allowed = max(2, round((t + 1) * (1 - share)))
        for layer, entries in zip(layers, cache.layers, strict=True):
            while entries.keys.shape[2] > allowed:
                merged = merge(entries.keys, entries.values, layer.attn.sizes)
                entries.keys, entries.values, layer.attn.sizes = merged
    return torch.stack(losses).mean()


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
    """An entry that stands for m tokens has the weight of m: + log m before the softmax."""
    bias = module.sizes.log()[:, None, None]  # (B, 1, 1, S)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return out.transpose(1, 2), None


def merge(keys: Tensor, values: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's most similar pair of an even and an odd slot becomes one entry, at the first."""
    B, H, S, D = keys.shape
    unit = F.normalize(keys.mean(1), dim=-1)  # (B, S, D)
    even, odd = unit[:, ::2], unit[:, 1::2]
    best = (even @ odd.mT).flatten(1).argmax(1)  # (B,)
    first, second = 2 * (best // odd.shape[1]), 2 * (best % odd.shape[1]) + 1
    low, high = torch.minimum(first, second), torch.maximum(first, second)
    row = torch.arange(B)
    a, b = sizes[row, low], sizes[row, high]
    kept = torch.arange(S).expand(B, S)[torch.arange(S)[None] != high[:, None]].view(B, S - 1)
    merged = []
    for x in (keys, values):
        mean = (a[:, None, None] * x[row, :, low] + b[:, None, None] * x[row, :, high]) / (a + b)[
            :, None, None
        ]
        x = x.clone()
        x[row, :, low] = mean
        merged.append(x.gather(2, kept[:, None, :, None].expand(B, H, S - 1, D)))
    sizes = sizes.clone()
    sizes[row, low] = a + b
    return merged[0], merged[1], sizes.gather(1, kept)


def draw(rows: list[dict[str, Any]]) -> None:
    figure, axis = plot.panel()
    labels = {"pruning": "pruned, fine-tuned", "merging": "merged, not fine-tuned"}
    for number, (method, label) in enumerate(labels.items(), 1):
        own = [row for row in rows if row["method"] == method]
        own.sort(key=lambda row: row["sparsity"])
        x, y = [100 * row["sparsity"] for row in own], [row["perplexity"] for row in own]
        plot.line(axis, number, x, y, label)
    axis.set(xlabel="context merged or pruned, %", ylabel="perplexity")
    plot.legend(axis)
    save_figure(figure, "merging")


if __name__ == "__main__":
    main()
