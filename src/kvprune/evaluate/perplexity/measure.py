"""Perplexity and sparsity by context size, and how far a pruned model is from the dense one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from kvprune.errors import PruneError
from kvprune.evaluate.points import Points
from kvprune.evaluate.reader import Reader, dropped_by
from kvprune.integration.handle import Pruned
from kvprune.integration.host import max_positions
from kvprune.text.windows import IGNORE, Windows, cut, sizes
from kvprune.utils.processes import ALONE, Group

Sums = dict[str, list[float]]
# the dense model's logits by batch, for the next method on the same windows
DenseLogits = dict[str, list[Tensor]]


@dataclass(frozen=True)
class AtContext:
    """How well tokens are predicted from contexts in (the previous size, this size].

    `sparsity` is at exactly this size: the share of the n − 1 earlier tokens that the n-th one
    cannot see, over layers and windows. In the row "all" it is over all pairs. `sparsity_scored` is
    of the tokens that the perplexity is of: the mean of that share over their positions, so that
    both cover the same ones. A context of 512 to 1,024 prunes less on the way than at its end.
    """

    context: int | Literal["all"]
    tokens: int  # predicted
    loss: float  # mean, in nats
    perplexity: float
    sparsity: float
    sparsity_scored: float | None = None  # None: from points of an earlier version
    dense_perplexity: float | None = None
    kl: float | None = None  # mean KL(dense ‖ pruned), in nats
    same: float | None = None  # share of tokens where both models predict the same next token

    def to_dict(self) -> dict[str, Any]:
        """Only what was measured."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def perplexity(
    model: PreTrainedModel | Pruned,
    ids: Tensor | Windows,
    contexts: Sequence[int] | None = None,
    *,
    length: int | None = None,
    stride: int | None = None,
    max_windows: int | None = None,
    dense: PreTrainedModel | Literal["open"] | None = None,
    path: str = "full",
    chunk: int = 64,
    batch: int = 4,
    points: Points | None = None,
    dense_logits: DenseLogits | None = None,
    progress: bool = True,
    group: Group = ALONE,
) -> list[AtContext]:
    """One row per context size, and one for all tokens; always with the hard gate.

    `ids`: a text (tokens,), cut by length and stride as in `windows.cut`, or rows (W, T).
    `dense` adds the comparison: a model, or "open" for this one with every gate open and LoRA off.
    `path`: "full" reads a window in one pass, "cached" in chunks through the cache as generation
    does, which also needs less memory for logits. `points` stores the sums of each batch.
    `dense_logits`: pass the same dict to every call that compares a method on the same windows with
    the same dense model, which then reads only once; it stores all logits that count.
    `group`: processes that share the batches, each with the same model and text. Batches are those
    of one process and sums are added exactly, so the numbers are the same, in all of them.
    """
    _check_choices(path, chunk, batch)
    windows = ids if isinstance(ids, Windows) else cut(ids, length, stride, max_windows)
    reader = Reader(model)
    if path == "full" and reader.pruned is not None and reader.pruned.config.cuts_prompts:
        raise PruneError(
            f"{reader.pruned.config.method} drops at the end of what it reads: in one pass over a "
            f"window it drops nothing that counts; use path='cached'"
        )
    _check_fits(reader.model, windows)
    reference = None if dense is None else _reference(reader, dense, windows)
    bins = _bins(windows, contexts)
    points = Points(None) if points is None else points

    def measure(part: Windows) -> Sums:
        parts = chunk if path == "cached" else None
        return _sums(reader, reference, part, bins, parts, dense_logits)

    batches = [windows.part(start, start + batch) for start in range(0, len(windows), batch)]
    settings = [_setting(part, number * batch) for number, part in enumerate(batches)]
    missing = [
        part for part, setting in zip(batches, settings, strict=True) if setting not in points
    ]
    measured = group.map(missing, measure)
    rows: list[dict[str, Any]] = []
    shown = None if progress and group.is_main else True
    with tqdm(total=len(windows), unit=" windows", disable=shown) as bar:
        for part, setting in zip(batches, settings, strict=True):
            rows += points.measure(setting, lambda: [next(measured)])
            bar.update(len(part))
    return _rows(bins, rows)


def _setting(part: Windows, start: int) -> dict[str, Any]:
    return {"windows": [start, start + len(part)], "text": part.digest()}


def _check_choices(path: str, chunk: int, batch: int) -> None:
    if path not in ("full", "cached"):
        raise PruneError(f"path={path!r} is unknown; choose 'full' or 'cached'")
    for name, value in (("chunk", chunk), ("batch", batch)):
        if value < 1:
            raise PruneError(f"{name}={value} must be a whole number, 1 or more")


def _check_fits(model: PreTrainedModel, windows: Windows) -> None:
    limit = max_positions(model)
    if limit is not None and windows.length > limit:
        raise PruneError(
            f"windows of {windows.length} tokens do not fit into the {limit} positions of the "
            f"model; lower the length"
        )
    vocabulary = model.config.get_text_config().vocab_size
    largest = max(int(windows.ids.max()), int(windows.targets.max()))
    if largest >= vocabulary:
        raise PruneError(
            f"the text holds token {largest}, the model knows {vocabulary}; tokenise it for this "
            f"model"
        )


def _reference(reader: Reader, dense: PreTrainedModel | str, windows: Windows) -> Reader:
    if isinstance(dense, str):
        if reader.pruned is None or dense != "open":
            raise PruneError(f"dense={dense!r}: pass a model, or 'open' for a pruned one's own")
        return Reader(reader.pruned, gates_open=True)
    _check_fits(dense, windows)
    dense_size, size = (m.config.get_text_config().vocab_size for m in (dense, reader.model))
    if dense_size != size:
        raise PruneError(
            f"the dense model knows {dense_size} tokens and the pruned one {size}; compare "
            f"models of one vocabulary"
        )
    return Reader(dense)


def _bins(windows: Windows, contexts: Sequence[int] | None) -> list[tuple[int, int]]:
    """Positions [start, stop) of each context size: the last sees exactly that size."""
    chosen = sizes(windows.length, windows.first) if contexts is None else sorted(set(contexts))
    if wrong := [n for n in chosen if not windows.first < n <= windows.length]:
        raise PruneError(
            f"nothing is predicted from a context of {wrong[0]} tokens; windows of "
            f"{windows.length} tokens have contexts of {windows.first + 1} to {windows.length}"
        )
    starts = [windows.first, *chosen[:-1]]
    bins = list(zip(starts, chosen, strict=True))
    target = (windows.targets != IGNORE).any(0)  # (T,)
    empty = [stop for start, stop in bins if not target[start:stop].any()]
    if empty and contexts is not None:
        raise PruneError(
            f"nothing is predicted from a context of {empty[0]} tokens, the last of the text; "
            f"choose a smaller context or add text"
        )
    return [pair for pair in bins if pair[1] not in empty]


def _sums(
    reader: Reader,
    reference: Reader | None,
    windows: Windows,
    bins: list[tuple[int, int]],
    chunk: int | None,
    kept: DenseLogits | None,
) -> Sums:
    """The sums of a batch by bin, and last over all tokens: plain numbers for a file."""
    # tokens that are only context need no logits; not possible in chunks
    skip = 0 if chunk else windows.first
    T, done = windows.length, skip
    parts: dict[str, list[Tensor]] = {}
    dense_parts = (
        repeat(None) if reference is None else _dense(reference, windows, chunk, skip, kept)
    )
    for logits, dense in zip(reader.read(windows.ids, chunk, skip), dense_parts, strict=False):
        want = windows.targets[:, done : done + logits.shape[1]].to(logits.device)
        for name, values in _by_token(logits, want, dense).items():
            parts.setdefault(name, []).append(values.double().sum(0).cpu())
        done += logits.shape[1]
    unread = torch.zeros(skip, dtype=torch.float64)
    summed = {name: torch.cat([unread, *values]) for name, values in parts.items()}  # (T,) each
    if not all(values.isfinite().all() for values in summed.values()):
        raise PruneError("the model predicts NaN or Inf; load its weights again, or use float32")
    spans = [slice(*pair) for pair in bins] + [slice(windows.first, T)]
    sums = {name: [float(values[span].sum()) for span in spans] for name, values in summed.items()}
    pairs = torch.arange(T, dtype=torch.float64) * len(windows)
    dropped = torch.zeros_like(pairs)
    if reader.drop_step is not None:
        dropped = dropped_by(reader.drop_step).double().mean(0).sum(0)  # (L, B, T) → (T,)
    for name, values in (("dropped", dropped), ("pairs", pairs)):
        # at the size itself, not in its bin
        sums[name] = [float(values[stop - 1]) for _, stop in bins]
        sums[name].append(float(values[windows.first :].sum()))
    # the first token has nothing to drop
    shares = dropped / pairs.clamp(min=1) * len(windows)
    sums["shares"] = [float(shares[span].sum()) for span in spans]
    sums["positions"] = [float(len(windows) * len(shares[span])) for span in spans]
    return sums


def _dense(
    reference: Reader, windows: Windows, chunk: int | None, skip: int, kept: DenseLogits | None
) -> Iterable[Tensor]:
    if kept is None:
        return reference.read(windows.ids, chunk, skip)
    key = f"{windows.digest()} {chunk}"
    if key not in kept:
        kept[key] = list(reference.read(windows.ids, chunk, skip))
    return kept[key]


def _by_token(logits: Tensor, want: Tensor, dense: Tensor | None) -> dict[str, Tensor]:
    """Per token (B, T): whether it counts, its loss, the comparison; 0 where it does not count."""
    real = want != IGNORE
    values_by_name: dict[str, list[Tensor]] = {}
    # row by row, as a batch of logits in float32 may not fit in memory
    for b in range(len(logits)):
        target = want[b].clamp(min=0)[:, None]
        log_p = logits[b].float().log_softmax(-1)  # (T, V)
        row = {"tokens": real[b].float(), "loss": -log_p.gather(-1, target)[:, 0]}
        if dense is not None:
            log_q = dense[b].to(log_p.device).float().log_softmax(-1)
            q = log_q.exp()
            row["dense_loss"] = -log_q.gather(-1, target)[:, 0]
            # a token that the dense model rules out (-inf) adds nothing: 0 · log 0 = 0
            row["kl"] = (q * (log_q - log_p)).where(q > 0, 0.0).sum(-1)
            row["same"] = (log_q.argmax(-1) == log_p.argmax(-1)).float()
        for name, values in row.items():
            values_by_name.setdefault(name, []).append(values.where(real[b], 0.0))
    return {name: torch.stack(rows) for name, rows in values_by_name.items()}


def _rows(bins: list[tuple[int, int]], parts: Sequence[dict[str, Any]]) -> list[AtContext]:
    total = {
        name: [math.fsum(column) for column in zip(*(part[name] for part in parts), strict=True)]
        for name in parts[0].keys() - {"windows", "text"}
    }
    rows = []
    contexts: list[int | Literal["all"]] = [*(stop for _, stop in bins), "all"]
    for i, context in enumerate(contexts):
        sums = {name: values[i] for name, values in total.items()}
        tokens, compared = sums["tokens"], "kl" in sums
        mean = {
            name: sums[name] / tokens
            for name in ("loss", "dense_loss", "kl", "same")
            if name in sums
        }
        rows.append(
            AtContext(
                context=context,
                tokens=int(tokens),
                loss=mean["loss"],
                perplexity=_exp(mean["loss"]),
                sparsity=sums["dropped"] / sums["pairs"] if sums["pairs"] else 0.0,
                sparsity_scored=sums["shares"] / sums["positions"] if "shares" in sums else None,
                dense_perplexity=_exp(mean["dense_loss"]) if compared else None,
                kl=mean.get("kl"),
                same=mean.get("same"),
            )
        )
    return rows


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # e^710 exceeds float64
