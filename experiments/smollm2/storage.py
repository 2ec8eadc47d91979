"""What a narrower cache costs SmolLM2: interaction keys in fewer bits, keys and values in int8.

    python -m experiments.smollm2.storage MODEL ADAPTER... --wikitext FILE --book FILE --news FILE

Every text is read in windows, a chunk at a time, through a cache of each form, and compared chunk
by chunk with the same reading through a cache that stores float32. Tokens of one chunk see each
other as they were computed, what earlier chunks left as it is stored; --chunk 1 is decoding.
Only `WHOLE`, the form that kv="int8" chooses, is read on all --tokens, the others on --few.
It resumes where it stopped; rows in docs/results/smollm2_storage.json, or another --name.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.publish import publish
from experiments.smollm2 import common
from experiments.smollm2.common import OURS, Adapter, Row, Subject, table
from experiments.smollm2.needle import step
from experiments.smollm2.quality import TEXTS, tokens
from kvprune import Pruned, PrunedCache
from kvprune.cache.extents import ExtentTable
from kvprune.cache.slots import SlotTable
from kvprune.cache.storage import Storage
from kvprune.errors import PruneError
from kvprune.evaluate.points import Points
from kvprune.ops.never import NEVER
from kvprune.text.windows import IGNORE, Windows, cut


class Form(NamedTuple):
    """How a cache stores keys and values, and interaction keys."""

    kv: str | None
    key_int: str
    rotate: bool = True  # keys, before they are rounded to int8

    def cache(self, pruned: Pruned) -> PrunedCache:
        cache = PrunedCache(pruned, record=True, kv=self.kv, key_int=self.key_int)
        if not self.rotate:
            storage = Unrotated(kv=self.kv, key_int=self.key_int)
            for layer in cache.stores:
                layer.storage = storage
        return cache

    def __str__(self) -> str:
        if self.kv is None:
            return f"interaction keys {self.key_int}"
        rotation = "" if self.rotate else ", no rotation"
        return f"{self.kv}{rotation}, interaction keys {self.key_int}"


class Unrotated(Storage):
    """Tables that store keys as they are: what rotation is compared with."""

    def new_table(self, *args: Any) -> SlotTable | ExtentTable:
        made = super().new_table(*args)
        assert isinstance(made, ExtentTable)
        made.rotation = None
        return made


REFERENCE = Form(None, "float32")
WHOLE = Form("int8", "float16")
FORMS = (
    Form(None, "float16"),
    Form(None, "bfloat16"),
    Form(None, "int8"),
    WHOLE,
    Form("int8", "float16", rotate=False),
    Form("int8", "int8"),
)


def main() -> None:
    parser = common.arguments(__doc__)
    for name in TEXTS:
        parser.add_argument(f"--{name}", type=Path, help="a text file, .txt or .txt.gz")
    parser.add_argument("--tokens", type=int, default=12_288, help="of each text")
    parser.add_argument("--few", type=int, default=4096, help="of each text, for the other forms")
    parser.add_argument("--length", type=int, default=1024, help="of a window")
    parser.add_argument("--chunk", type=int, default=64, help="tokens that are read at once")
    parser.add_argument("--at-once", type=int, default=4, help="windows that are read together")
    parser.add_argument("--name", default="smollm2_storage", help="name of the rows")
    args = parser.parse_args()
    rows = summary(run(args))
    about = {"model": str(args.model), "length": args.length, "chunk": args.chunk}
    publish(args.name, about, rows, args.docs)
    show(rows)


def run(args: argparse.Namespace) -> list[Row]:
    """Sums by strength, text, form and group of windows."""
    size = args.at_once * args.length
    if not 0 <= args.few <= args.tokens or args.tokens % size or args.few % size:
        raise PruneError(
            f"{args.few} of {args.tokens} tokens are no groups of {args.at_once} windows of "
            f"{args.length}; choose multiples of {size}"
        )
    subject = common.subject(args)
    # a file for each strength: two processes may measure one each
    points = {a.name: common.points(args, f"storage-{a.name}") for a in subject.adapters}
    texts = {name: getattr(args, name) for name in TEXTS if getattr(args, name)}
    windows = {
        name: cut(tokens(subject, file, args.tokens + 1), args.length)
        for name, file in texts.items()
    }
    rows: list[Row] = []
    # the start of all texts first: early results
    for start in range(0, args.tokens // args.length, args.at_once):
        forms = FORMS if start * args.length < args.few else (WHOLE,)
        for adapter in subject.adapters:
            for name, whole in windows.items():
                part = whole.part(start, start + args.at_once)
                done = points[adapter.name]
                rows += group(subject, adapter, done, name, part, forms, args.chunk)
    return rows


def group(
    subject: Subject,
    adapter: Adapter,
    points: Points,
    text: str,
    windows: Windows,
    forms: tuple[Form, ...],
    chunk: int,
) -> list[Row]:
    """The rows of some windows: those that are not stored yet are measured, all forms in turn."""
    where = {"strength": adapter.name, "adapter": adapter.digest, "text": text, "chunk": chunk}
    where["windows"] = windows.digest()
    settings = {form: where | form._asdict() for form in forms}
    missing = [form for form in forms if settings[form] not in points]
    measured: dict[Form, list[Row]] = {}
    if missing:
        with subject.attached(OURS, adapter) as pruned:
            measured = compare(pruned, windows, missing, chunk)
    rows = []
    for form, setting in settings.items():
        (row,) = points.measure(setting, partial(measured.__getitem__, form))
        print(line(row, form), flush=True)
        rows.append(row)
    return rows


def compare(
    pruned: Pruned, windows: Windows, forms: list[Form], chunk: int
) -> dict[Form, list[Row]]:
    """The row of each form: sums against the reference."""
    caches = {form: form.cache(pruned) for form in (REFERENCE, *forms)}
    sums: dict[Form, Counter[str]] = {form: Counter() for form in forms}
    for ids, want in zip(windows.ids.split(chunk, 1), windows.targets.split(chunk, 1), strict=True):
        log_q = step(pruned, caches[REFERENCE], ids).float().log_softmax(-1)  # (B, chunk, V)
        for form in forms:
            log_p = step(pruned, caches[form], ids).float().log_softmax(-1)
            sums[form].update(by_logits(log_q, log_p, want))
    for form in forms:
        sums[form].update(by_votes(caches[REFERENCE].drop_step, caches[form].drop_step))
    return {form: [dict(counted)] for form, counted in sums.items()}


def by_logits(log_q: Tensor, log_p: Tensor, want: Tensor) -> dict[str, float]:
    """Sums over tokens that have a next one: losses, KL(reference ‖ form), equal predictions."""
    real = want != IGNORE
    target = want.clamp(min=0)[..., None]
    values = {
        "tokens": real,
        "loss": -log_p.gather(-1, target)[..., 0],
        "reference_loss": -log_q.gather(-1, target)[..., 0],
        "kl": (log_q.exp() * (log_q - log_p)).sum(-1),
        "same": log_p.argmax(-1) == log_q.argmax(-1),
    }
    return {name: float(value[real].double().sum()) for name, value in values.items()}


def by_votes(reference: Tensor, form: Tensor) -> dict[str, float]:
    """What votes decided, from drop steps (L, B, T).

    `moved`: tokens that are dropped at another step, or only by one of both. `votes`: pairs of a
    token and an earlier one that it sees, `flipped`: pairs of which only one of both sees it.
    `sets`: of tokens held at the end, one per layer and row.
    """
    T = reference.shape[-1]
    last, other = (steps.clamp(max=T) for steps in (reference, form))
    held, own = reference == NEVER, form == NEVER
    return {
        "decisions": reference.numel(),
        "moved": int((reference != form).sum()),
        "votes": int((last - 1 - torch.arange(T)).clamp(min=0).sum()),
        "flipped": int((last - other).abs().sum()),
        "sets": held[..., 0].numel(),
        "sets_unlike": int((held != own).any(-1).sum()),
        "held": int(held.sum()),
        "held_unlike": int((held != own).sum()),
    }


def shares(rows: list[Row]) -> Row:
    """Means of sums."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update({name: value for name, value in row.items() if name in SUMS})
    loss, before = (total[name] / total["tokens"] for name in ("loss", "reference_loss"))
    return {
        "tokens": int(total["tokens"]),
        "perplexity": math.exp(loss), "ratio": math.exp(loss - before),
        **{name: total[name] / total["tokens"] for name in ("kl", "same")},
        "moved": total["moved"] / total["decisions"],
        "flipped": total["flipped"] / total["votes"],
        "sets_unlike": total["sets_unlike"] / total["sets"],
        "held_unlike": total["held_unlike"] / total["held"],
    }  # fmt: skip


SUMS = {
    "tokens", "loss", "reference_loss", "kl", "same", "decisions", "moved", "votes", "flipped",
    "sets", "sets_unlike", "held", "held_unlike",
}  # fmt: skip
KEY = ("strength", "kv", "key_int", "rotate", "text")


def summary(rows: list[Row]) -> list[Row]:
    """One row per strength, form and text."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in KEY), []).append(row)
    return [dict(zip(KEY, key, strict=True)) | shares(own) for key, own in groups.items()]


def line(row: Row, form: Form) -> str:
    own = shares([row])
    return (
        f"{row['strength']:16} {row['text']:9} {form!s:50} KL {own['kl']:.6f}  perplexity "
        f"{own['ratio'] - 1:+.4%}  other drop step {own['moved']:.3%}"
    )


def show(rows: list[Row]) -> None:
    """For docs/caches.md: texts side by side."""
    groups: dict[tuple[str, Form], list[Row]] = {}
    for row in rows:
        form = Form(row["kv"], row["key_int"], row["rotate"])
        groups.setdefault((row["strength"], form), []).append(row)

    def each(own: list[Row], form: str, name: str, less: float = 0) -> str:
        return " · ".join(format(row[name] - less, form) for row in own)

    table(
        ["strength", "stored", "tokens", "KL", "perplexity", "same token", "other drop step",
         "pairs seen by one only", "held by one only", "sets that differ"],
        [
            [strength, str(form), f"{own[0]['tokens']:,}", each(own, ".5f", "kl"),
             each(own, "+.3%", "ratio", 1), each(own, ".1%", "same"), each(own, ".2%", "moved"),
             each(own, ".3%", "flipped"), each(own, ".2%", "held_unlike"),
             each(own, ".0%", "sets_unlike")]
            for (strength, form), own in groups.items()
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
