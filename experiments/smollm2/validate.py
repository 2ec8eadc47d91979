"""What an adapter costs on held-out text and chats, as one line of JSON; for choices in training.

    python -m experiments.smollm2.validate MODEL ADAPTER... --texts DIR --chats FILE --log FILE

Each text of DIR (valid_*.txt of mixture.py) is read in windows of 1,024 tokens; the second half of
each counts. A token is repeated if the four tokens before it occurred earlier in the window,
followed by the same token. Chats count the tokens of the dense model's own answers. Rows of an
adapter that FILE has already are not measured again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import kvprune
from experiments.smollm2.common import digest
from kvprune import Pruned
from kvprune.adapters.dense import as_base_model
from kvprune.adapters.pretrained import load_base, load_tokenizer
from kvprune.errors import PruneError
from kvprune.utils.malloc import keep_memory
from kvprune.utils.quiet import quiet

GRAM = 4
Sums = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("adapters", type=Path, nargs="+")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--part", default="valid", help="valid; test once, at the end")
    parser.add_argument("--chats", type=Path, help="written by answers.py, of held-out documents")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=4, help="per text")
    parser.add_argument("--name", help="of the adapter, in the log; by default its folder's")
    parser.add_argument("--log", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    keep_memory()
    tokenizer = load_tokenizer(args.model)
    texts = {
        file.stem.removeprefix(f"{args.part}_"): windows(
            file.read_text(), tokenizer, args.context, args.windows
        )
        for file in sorted(args.texts.glob(f"{args.part}_*.txt"))
    }
    if not texts:
        raise PruneError(f"{args.texts} has no {args.part}_*.txt; run mixture.py first")
    chats = list(answered(args.chats, tokenizer)) if args.chats else []
    hashed = hashlib.sha256(b"".join(part.numpy().tobytes() for part in texts.values()))
    for folder in args.adapters:
        about = {
            "adapter": args.name or folder.name, "digest": digest(folder), "part": args.part,
            "context": args.context, "windows": args.windows, "chats": len(chats),
            "texts": hashed.hexdigest()[:12],
        }  # fmt: skip
        if any(about.items() <= row.items() for row in logged(args.log)):
            continue
        with kvprune.load(load_base(args.model, "float32"), folder) as pruned:
            row = {**about, **measured(pruned, texts, chats)}
        args.log.parent.mkdir(parents=True, exist_ok=True)
        with args.log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(line(row), flush=True)


def logged(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['adapter']}: {row['sparsity']:.1%} pruned, perplexity {row['ratio']:.4f} of dense "
        f"(worst {row['worst']:.4f}), KL {row['kl']:.4f}, repeated {row['repeated_ratio']:.4f}, "
        f"chats KL {row.get('chat_kl', math.nan):.4f}"
    )


def windows(text: str, tokenizer: Any, context: int, count: int) -> Tensor:
    """Evenly spaced over the text: (count, context)."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    if len(ids) < count * context:
        raise PruneError(f"a text has {len(ids)} tokens, {count * context} are needed")
    starts = [i * (len(ids) - context) // max(count - 1, 1) for i in range(count)]
    return torch.stack([ids[start : start + context] for start in starts])


def answered(file: Path, tokenizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens of each conversation, and which of them an answer predicts: (1, T), (1, T)."""
    for row in map(json.loads, file.read_text().splitlines()):
        ids: list[int] = []
        own: list[bool] = []
        for end, message in enumerate(row["messages"], 1):
            said = message["role"] == "assistant"
            text = tokenizer.apply_chat_template(row["messages"][:end], tokenize=False)
            now = tokenizer(text, add_special_tokens=False).input_ids
            own += [said] * (len(now) - len(ids))
            ids = now
        if any(own):
            yield torch.tensor([ids]), torch.tensor([own])


def measured(
    pruned: Pruned, texts: dict[str, Tensor], chats: list[tuple[Tensor, Tensor]]
) -> dict[str, Any]:
    rows: dict[str, dict[str, float]] = {}
    for name, ids in texts.items():
        counts = torch.zeros(ids.shape, dtype=torch.bool)
        counts[:, ids.shape[1] // 2 :] = True
        total: Sums = defaultdict(float)
        for window, counted in zip(ids, counts, strict=True):
            add(total, compare(pruned, window[None], counted[None]))
        rows[name] = summary(total)
    total = defaultdict(float)
    for row in rows.values():
        for key in ("dense_repeated", "pruned_repeated", "repeated"):
            total[key] += row[f"sum_{key}"]
    result: dict[str, Any] = {
        "sparsity": mean(row["sparsity"] for row in rows.values()),
        "ratio": mean(row["ratio"] for row in rows.values()),
        "worst": max(row["ratio"] for row in rows.values()),
        "kl": mean(row["kl"] for row in rows.values()),
        "repeated_ratio": repeated_ratio(total),
        "texts_measured": rows,
    }
    if chats:
        total = defaultdict(float)
        for ids, own in chats:
            add(total, compare(pruned, ids, own))
        talk = summary(total)
        result |= {f"chat_{key}": talk[key] for key in ("kl", "same", "sparsity", "ratio")}
    return result


def compare(pruned: Pruned, ids: Tensor, counted: Tensor) -> Sums:
    """Sums over the counted tokens of a row, dense and pruned. ids, counted: (1, T)"""
    with torch.no_grad(), pruned.evaluating():
        got = pruned.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        steps = pruned.last_pass.drop_step()
        with as_base_model(pruned):
            want = pruned.model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    assert steps is not None
    target, counts = ids[0, 1:], counted[0, 1:]
    repeats = repeated(ids[0])[1:] & counts
    loss = [F.nll_loss(logits, target, reduction="none") for logits in (want, got)]
    kl = (want.exp() * (want - got)).sum(-1)
    last = ids.shape[1] - 1
    return {
        "tokens": float(counts.sum()),
        "dense": float(loss[0][counts].sum()),
        "pruned": float(loss[1][counts].sum()),
        "kl": float(kl[counts].sum()),
        "same": float((want.argmax(-1) == got.argmax(-1))[counts].sum()),
        "repeated": float(repeats.sum()),
        "dense_repeated": float(loss[0][repeats].sum()),
        "pruned_repeated": float(loss[1][repeats].sum()),
        "rows": 1.0,
        "dropped": float((steps[..., :last] <= last).float().mean()),
    }


def repeated(ids: Tensor) -> Tensor:
    """Which tokens continue a run of four as it was continued before: (T,), of (T,)."""
    seen: set[tuple[int, ...]] = set()
    marks = []
    values = ids.tolist()
    for place in range(len(values)):
        gram = tuple(values[max(0, place - GRAM) : place + 1])
        marks.append(len(gram) == GRAM + 1 and gram in seen)
        seen.add(gram)
    return torch.tensor(marks)


def add(total: Sums, more: Sums) -> None:
    for key, value in more.items():
        total[key] += value


def summary(total: Sums) -> dict[str, float]:
    tokens = total["tokens"]
    return {
        "sparsity": total["dropped"] / total["rows"],
        "perplexity": math.exp(total["pruned"] / tokens),
        "ratio": math.exp((total["pruned"] - total["dense"]) / tokens),
        "kl": total["kl"] / tokens,
        "same": total["same"] / tokens,
        "repeated_ratio": repeated_ratio(total),
        "sum_repeated": total["repeated"],
        "sum_dense_repeated": total["dense_repeated"],
        "sum_pruned_repeated": total["pruned_repeated"],
    }


def repeated_ratio(total: Sums) -> float:
    """Perplexity of the repeated tokens over dense; 1 where there are none."""
    return math.exp(
        (total["pruned_repeated"] - total["dense_repeated"]) / max(total["repeated"], 1)
    )


if __name__ == "__main__":
    main()
