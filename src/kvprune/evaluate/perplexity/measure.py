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

Sums = dict[str, list[float]]
# the dense model's logits by batch, for the next method on the same windows
DenseLogits = dict[str, list[Tensor]]


@dataclass(frozen=True)
class AtContext:
    """How well tokens are predicted from a context of (the size asked before, this size] tokens.

    `sparsity` is that at this very size: the share of the n − 1 earlier tokens that the n-th token
    cannot see, over layers and windows. In the row "all" it is that over all pairs.
    """

    context: int | Literal["all"]
    tokens: int  # predicted
    loss: float  # mean, in nats
    perplexity: float
    sparsity: float
    dense_perplexity: float | None = None
    kl: float | None = None  # mean KL(dense ‖ pruned), in nats
    same: float | None = None  # share of tokens whose likeliest is the dense model's, too

    def to_dict(self) -> dict[str, Any]:
        """Without what was not measured."""
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
) -> list[AtContext]:
    """A row for each context size, and one for all tokens; always with the hard gate.

    `ids`: a text (tokens,), cut by length and stride as `windows.cut` says, or rows (W, T).
    `dense` adds the comparison: a model, or "open" for this one with every gate open and LoRA off.
    `path`: "full" reads a window in one pass, "cached" in chunks through the cache as generation
    does, which also needs less memory for logits. `points` keeps what each batch added up.
    `dense_logits`: an empty dict that is passed again and again while methods are compared on the
    same windows and the same dense model, which then reads once; it holds all logits that count.
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
    beside = None if dense is None else _beside(reader, dense, windows)
    bins = _bins(windows, contexts)
    parts: list[dict[str, Any]] = []
    bar = tqdm(total=len(windows), unit=" windows", disable=None if progress else True)
    with bar:
        for start in range(0, len(windows), batch):
            part = windows.part(start, start + batch)
            setting = {"windows": [start, start + len(part)], "text": part.digest()}

            def measure(part: Windows = part) -> list[Sums]:
                parts = chunk if path == "cached" else None
                return [_sums(reader, beside, part, bins, parts, dense_logits)]

            parts += points.measure(setting, measure) if points else measure()
            bar.update(len(part))
    return _rows(bins, parts)


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


def _beside(reader: Reader, dense: PreTrainedModel | str, windows: Windows) -> Reader:
    if isinstance(dense, str):
        if reader.pruned is None or dense != "open":
            raise PruneError(f"dense={dense!r}: pass a model, or 'open' for a pruned one's own")
        return Reader(reader.pruned, gates_open=True)
    _check_fits(dense, windows)
    theirs, ours = (m.config.get_text_config().vocab_size for m in (dense, reader.model))
    if theirs != ours:
        raise PruneError(
            f"the dense model knows {theirs} tokens and the pruned one {ours}; compare models of "
            f"one vocabulary"
        )
    return Reader(dense)


def _bins(windows: Windows, contexts: Sequence[int] | None) -> list[tuple[int, int]]:
    """Positions [start, stop) of each context size: the last sees exactly that size."""
    asked = sizes(windows.length, windows.first) if contexts is None else sorted(set(contexts))
    if wrong := [n for n in asked if not windows.first < n <= windows.length]:
        raise PruneError(
            f"nothing is predicted from a context of {wrong[0]} tokens; windows of "
            f"{windows.length} tokens have contexts of {windows.first + 1} to {windows.length}"
        )
    starts = [windows.first, *asked[:-1]]
    bins = list(zip(starts, asked, strict=True))
    target = (windows.targets != IGNORE).any(0)  # (T,)
    empty = [stop for start, stop in bins if not target[start:stop].any()]
    if empty and contexts is not None:
        raise PruneError(
            f"nothing is predicted from a context of {empty[0]} tokens, the last of the text; "
            f"ask for a smaller context or add text"
        )
    return [pair for pair in bins if pair[1] not in empty]


def _sums(
    reader: Reader,
    beside: Reader | None,
    windows: Windows,
    bins: list[tuple[int, int]],
    chunk: int | None,
    kept: DenseLogits | None,
) -> Sums:
    """What a batch adds to each bin, and at the end to all: plain numbers for a file."""
    # read at once, what is context only needs no logits
    skip = 0 if chunk else windows.first
    T, done = windows.length, skip
    parts: dict[str, list[Tensor]] = {}
    theirs = repeat(None) if beside is None else _dense(beside, windows, chunk, skip, kept)
    for logits, dense in zip(reader.read(windows.ids, chunk, skip), theirs, strict=False):
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
    return sums


def _dense(
    beside: Reader, windows: Windows, chunk: int | None, skip: int, kept: DenseLogits | None
) -> Iterable[Tensor]:
    if kept is None:
        return beside.read(windows.ids, chunk, skip)
    key = f"{windows.digest()} {chunk}"
    if key not in kept:
        kept[key] = list(beside.read(windows.ids, chunk, skip))
    return kept[key]


def _by_token(logits: Tensor, want: Tensor, dense: Tensor | None) -> dict[str, Tensor]:
    """Of each token (B, T): is it predicted, its loss, and the comparison; 0 where it is not."""
    real = want != IGNORE
    made: dict[str, list[Tensor]] = {}
    # row by row, as a whole batch of logits in float32 may not fit
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
            made.setdefault(name, []).append(values.where(real[b], 0.0))
    return {name: torch.stack(rows) for name, rows in made.items()}


def _rows(bins: list[tuple[int, int]], parts: Sequence[dict[str, Any]]) -> list[AtContext]:
    total = {
        name: [math.fsum(column) for column in zip(*(part[name] for part in parts), strict=True)]
        for name in parts[0].keys() - {"windows", "text"}
    }
    made = []
    contexts: list[int | Literal["all"]] = [*(stop for _, stop in bins), "all"]
    for i, context in enumerate(contexts):
        here = {name: values[i] for name, values in total.items()}
        tokens, compared = here["tokens"], "kl" in here
        mean = {
            name: here[name] / tokens
            for name in ("loss", "dense_loss", "kl", "same")
            if name in here
        }
        made.append(
            AtContext(
                context=context,
                tokens=int(tokens),
                loss=mean["loss"],
                perplexity=_exp(mean["loss"]),
                sparsity=here["dropped"] / here["pairs"] if here["pairs"] else 0.0,
                dense_perplexity=_exp(mean["dense_loss"]) if compared else None,
                kl=mean.get("kl"),
                same=mean.get("same"),
            )
        )
    return made


def _exp(loss: float) -> float:
    return math.exp(min(loss, 700.0))  # e^710 is no number of float64
