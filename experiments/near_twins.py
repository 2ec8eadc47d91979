"""Are tokens dropped that have a near twin? The paper's definitions, with intervals.

    python -m experiments.near_twins --text FILE
    python -m experiments.near_twins --text FILE --model smollm2-135m --adapter smollm2-135m-80

App. C, Fig. 17: the distance from a token's key to the nearest other key, 1 − max cos, of tokens
that are dropped later and of those that are not. Its text compares with all other tokens of the
sequence, its caption with those that are not pruned: both are here. Keys as the cache holds them,
and before the rotation of positions, which makes near tokens alike whatever they are. Intervals are
95 %, by bootstrap over texts, of the ratio of the two means.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import small
from experiments.publish import DOCS, publish
from kvprune import Pruned, PruningConfig, tiny
from kvprune.adapters.load import load_with_tokenizer
from kvprune.explain.corpus_study import read_rows
from kvprune.explain.nearest_keys import keys_of, nearest_distance
from kvprune.ops.timeline import NEVER
from kvprune.utils.intervals import bootstrap
from kvprune.utils.quiet import quiet

AMONG = ("all other tokens", "tokens that stay")
Sums = tuple[float, int, float, int]  # distances of dropped tokens, how many, and of kept ones


def main() -> None:
    parser = small.arguments(__doc__)
    parser.add_argument("--text", default=str(tiny.text_file("held_out")))
    parser.add_argument("--model", help="instead of γ = 0.3 of tiny_curve.py, both seeds")
    parser.add_argument("--adapter")
    parser.add_argument("--texts", type=int, default=32, help="rows of the text")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--name", default="near_twins")
    parser.add_argument("--docs", type=Path, default=DOCS)
    args = parser.parse_args()
    quiet()
    if args.model:
        models = [(args.adapter or args.model, args.model, args.adapter)]
    else:
        runs, method = small.Runs(args.runs), PruningConfig(rank=small.RANK)
        models = [(f"tiny, seed {seed}", str(runs.run_folder(method, seed, gamma=0.3)), None)
                  for seed in range(args.seeds)]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for name, model, adapter in models:
        loaded = load_with_tokenizer(model, adapter)
        pruned = loaded.attached()
        texts = islice(read_rows([args.text], loaded.tokenizer, args.length), args.texts)
        rows += [{"model": name, **row} for row in measured(pruned, list(texts))]
    publish(args.name, {"texts": args.texts, "length": args.length}, rows, args.docs)
    print("\n".join(verdicts(rows)))


def measured(pruned: Pruned, texts: Sequence[list[int]]) -> list[dict[str, Any]]:
    sums: dict[tuple[str, str, int], list[Sums]] = {}
    for number, ids in enumerate(texts):
        keys, steps = keys_of(pruned, ids)
        for layer, (rotated, step) in enumerate(zip(keys, steps, strict=True)):
            stays = step == NEVER
            if stays.all() or not stays.any():
                continue
            versions = {"as stored": rotated, "not rotated": unrotated(pruned, rotated)}
            for version, key in versions.items():
                if key is None:
                    continue
                for among in AMONG:
                    candidates = stays if among == AMONG[1] else torch.ones_like(stays)
                    distance = nearest_distance(key, candidates)
                    gone, kept = distance[~stays], distance[stays & distance.isfinite()]
                    sums.setdefault((version, among, layer), []).append(
                        (float(gone.sum()), len(gone), float(kept.sum()), len(kept))
                    )
        print(f"text {number + 1} of {len(texts)}", flush=True)
    return [row(key, cases) for key, cases in sums.items()]


def unrotated(pruned: Pruned, keys: Tensor) -> Tensor | None:
    """Keys (T, H·D) before the rotation by position; None where the model rotates nothing.

    k = r cos θ + R(r) sin θ,  R(a, b) = (−b, a),  so  r = k cos θ − R(k) sin θ
    """
    rotary = getattr(pruned.model.base_model, "rotary_emb", None)
    if rotary is None:
        return None
    heads = pruned.model.config.num_key_value_heads
    key = keys.view(len(keys), heads, -1).transpose(0, 1)[None]  # (1, H, T, D)
    cos, sin = rotary(key, torch.arange(len(keys))[None])
    first, second = key.chunk(2, -1)
    plain = key * cos[:, None] - torch.cat([-second, first], -1) * sin[:, None]
    return plain[0].transpose(0, 1).flatten(1)


def row(key: tuple[str, str, int], cases: list[Sums]) -> dict[str, Any]:
    version, among, layer = key
    low, high = bootstrap(cases, ratio)
    gone, n_gone, kept, n_kept = (sum(column) for column in zip(*cases, strict=True))
    return {
        "keys": version, "among": among, "layer": layer, "texts": len(cases), "dropped": n_gone,
        "kept": n_kept, "mean_dropped": gone / n_gone, "mean_kept": kept / n_kept,
        "ratio": ratio(cases), "low": low, "high": high,
    }  # fmt: skip


def ratio(cases: Sequence[Sums]) -> float:
    """Below 1: dropped tokens have nearer twins."""
    gone, n_gone, kept, n_kept = (sum(column) for column in zip(*cases, strict=True))
    return (gone / n_gone) / (kept / n_kept) if kept else float("nan")


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in rows:
        groups.setdefault((one["model"], one["keys"], one["among"]), []).append(one)
    return [
        f"{', '.join(key)}: dropped tokens have nearer twins in "
        f"{sum(r['high'] < 1 for r in group)} of {len(group)} layers, farther ones in "
        f"{sum(r['low'] > 1 for r in group)}; means {mean(group, 'mean_dropped'):.3f} and "
        f"{mean(group, 'mean_kept'):.3f}"
        for key, group in groups.items()
    ]


def mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(one[name] for one in rows) / len(rows)


if __name__ == "__main__":
    main()
