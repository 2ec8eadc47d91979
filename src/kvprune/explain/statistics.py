"""Statistics of what a model drops, over many traces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvprune.errors import PruneError
from kvprune.explain import parts_of_speech
from kvprune.explain.token_text import KINDS, token_kind
from kvprune.explain.trace import Trace
from kvprune.ops.timeline import NEVER

BINS = 32


@dataclass(frozen=True)
class Kept:
    """How long the tokens of one class are kept: the share of later tokens that still see them."""

    share: float
    by_layer: list[float]
    tokens: int


@dataclass(frozen=True)
class Droppers:
    """The share of all drops that the tokens of one class cause, and how common they are."""

    share: float
    by_layer: list[float]  # 0 in a layer that drops nothing
    of_tokens: float  # their share of all tokens


@dataclass(frozen=True)
class Statistics:
    """All statistics; a share that is kept is of the pairs of a token and a later one."""

    texts: int
    tokens: int
    layers: list[int]
    sparsity_by_layer: list[float]
    drops_by_layer: list[int]
    kept_by_speech: dict[str, Kept]  # empty without a tagger
    kept_by_kind: dict[str, Kept]
    droppers_by_kind: dict[str, Droppers]
    top_droppers: dict[str, Droppers]  # by the token's text without surrounding spaces
    dropped_by_position: list[list[float]]  # (L, bins): share dropped by the end of the text
    positions: list[int]  # where each bin starts
    lifetimes: list[list[float]]  # (L, b): share of tokens with 2^b ≤ lifetime < 2^(b+1)
    kept_by_distance: list[list[float]]  # (L, distance − 1): share of pairs still seen


def statistics(traces: Sequence[Trace], top: int = 12) -> Statistics:
    """Count over traces of the same model; they must have the same layers."""
    if not traces:
        raise PruneError("there are no traces to count; give at least one text")
    layers = traces[0].layers
    if any(trace.layers != layers for trace in traces):
        raise PruneError("the traces have different layers; count those of one model at a time")
    kinds = [[token_kind(token) for token in trace.tokens] for trace in traces]
    stripped = [[token.strip() or repr(token)[1:-1] for token in t.tokens] for t in traces]
    by_token = _droppers(traces, stripped)
    busiest = sorted(by_token, key=lambda name: -by_token[name].share)[:top]
    tagged = parts_of_speech.available()
    parts = [parts_of_speech.tag_tokens(trace.tokens) for trace in traces] if tagged else []
    positions, dropped = _by_position(traces)
    return Statistics(
        texts=len(traces),
        tokens=sum(len(trace.tokens) for trace in traces),
        layers=list(layers),
        sparsity_by_layer=_sparsity(traces),
        drops_by_layer=sum((t.drop_step < NEVER).sum(1) for t in traces).tolist(),
        kept_by_speech=_kept(traces, parts) if tagged else {},
        kept_by_kind=_kept(traces, kinds),
        droppers_by_kind={k: d for k in KINDS if (d := _droppers(traces, kinds).get(k))},
        top_droppers={name: by_token[name] for name in busiest},
        dropped_by_position=dropped,
        positions=positions,
        lifetimes=_lifetimes(traces),
        kept_by_distance=_by_distance(traces),
    )


def seen_later(trace: Trace) -> np.ndarray:
    """How many later tokens still see each token: (L, T)."""
    T = len(trace.tokens)
    seen: np.ndarray = np.minimum(trace.drop_step, T) - 1 - np.arange(T)
    return seen


def _sparsity(traces: Sequence[Trace]) -> list[float]:
    seen: np.ndarray = np.sum([seen_later(trace).sum(1) for trace in traces], axis=0)
    pairs = sum(len(trace.tokens) * (len(trace.tokens) - 1) // 2 for trace in traces)
    # texts of a single token have no pairs
    shares: list[float] = (1 - seen / pairs if pairs else np.zeros(len(seen))).tolist()
    return shares


def _kept(traces: Sequence[Trace], classes: Sequence[Sequence[str]]) -> dict[str, Kept]:
    seen: dict[str, Any] = {}
    pairs, tokens = Counter[str](), Counter[str]()
    for trace, names in zip(traces, classes, strict=True):
        later, T = seen_later(trace), len(trace.tokens)
        for j, name in enumerate(names):
            seen[name] = seen.get(name, 0) + later[:, j]
            pairs[name] += T - 1 - j
            tokens[name] += 1
    shares = {name: seen[name] / pairs[name] for name in seen if pairs[name]}
    order = sorted(shares, key=lambda name: -float(shares[name].mean()))
    return {
        name: Kept(float(shares[name].mean()), shares[name].tolist(), tokens[name])
        for name in order
    }


def _droppers(traces: Sequence[Trace], classes: Sequence[Sequence[str]]) -> dict[str, Droppers]:
    L = len(traces[0].layers)
    caused: dict[str, np.ndarray] = {}
    tokens = Counter[str]()
    total = np.zeros(L)
    for trace, names in zip(traces, classes, strict=True):
        tokens.update(names)
        for layer, step in enumerate(trace.drop_step):
            for dropper, count in Counter(step[step < NEVER].tolist()).items():
                caused.setdefault(names[dropper], np.zeros(L))[layer] += count
                total[layer] += count
    none, all_drops = np.zeros(L), max(float(total.sum()), 1)
    return {
        name: Droppers(
            float(caused.get(name, none).sum()) / all_drops,
            (caused.get(name, none) / np.maximum(total, 1)).tolist(),
            tokens[name] / tokens.total(),
        )
        for name in tokens
    }


def _by_position(traces: Sequence[Trace]) -> tuple[list[int], list[list[float]]]:
    longest = max(len(trace.tokens) for trace in traces)
    width = -(-longest // BINS)
    bins = -(-longest // width)
    dropped, tokens = np.zeros((len(traces[0].layers), bins)), np.zeros(bins)
    for trace in traces:
        bin_of = np.arange(len(trace.tokens)) // width
        tokens += np.bincount(bin_of, minlength=bins)
        for layer, step in enumerate(trace.drop_step):
            dropped[layer] += np.bincount(bin_of, weights=step < NEVER, minlength=bins)
    return [b * width for b in range(bins)], (dropped / tokens).tolist()


def _lifetimes(traces: Sequence[Trace]) -> list[list[float]]:
    longest = max(len(trace.tokens) for trace in traces)
    bins = max(longest - 1, 1).bit_length()
    counts = np.zeros((len(traces[0].layers), bins))
    for trace in traces:
        layer, token = np.nonzero(trace.drop_step < NEVER)
        life = trace.drop_step[layer, token] - token
        np.add.at(counts, (layer, np.log2(life).astype(int)), 1)
    shares: list[list[float]] = (counts / sum(len(t.tokens) for t in traces)).tolist()
    return shares


def _by_distance(traces: Sequence[Trace]) -> list[list[float]]:
    """A token seen by n later tokens is seen at distances 1..n: a reversed cumulative sum."""
    longest = max(len(trace.tokens) for trace in traces)
    lifetimes, tokens = np.zeros((len(traces[0].layers), longest)), np.zeros(longest)
    for trace in traces:
        T = len(trace.tokens)
        tokens[:T] += 1  # for each n < T, one token has n later ones
        for layer, later in enumerate(seen_later(trace)):
            np.add.at(lifetimes[layer], later, 1)
    seen = lifetimes[:, ::-1].cumsum(1)[:, ::-1][:, 1:]  # pairs seen at each distance
    pairs = tokens[::-1].cumsum()[::-1][1:]
    shares: list[list[float]] = (seen / pairs).tolist()
    return shares
