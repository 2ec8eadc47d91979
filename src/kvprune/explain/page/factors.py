"""The scores of all pairs of a text in a given number of bytes, for the curves of the page.

Two thousand tokens have two million pairs in each layer, but their scores are a product of two
thin matrices. Its singular vectors are rounded so that each adds the same noise D to a score, and
those that add less than that are left out: of all ways to spend the bytes, the one with the least
squared error (reverse water-filling).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvprune.explain.page.packing import pack, quantise
from kvprune.explain.votes import Votes

# as a share of the standard deviation of the scores: less than half a pixel of a curve
PRECISION = 0.02


@dataclass(frozen=True)
class Spectrum:
    """q_int·k_int of one layer as Σ gain[c] · query[c, i] · key[c, j], of unit variance each."""

    query: np.ndarray  # (R, T)
    key: np.ndarray  # (R, T)
    gain: np.ndarray  # (R,), falling


@dataclass(frozen=True)
class Factors:
    """The rounded parts of every layer, those with the largest gain first."""

    query: np.ndarray  # (C, T) integers
    key: np.ndarray  # (C, T) integers
    layer: np.ndarray  # (C,)
    weight: np.ndarray  # (C,), of the product of the two integers

    def scores(self, layer: int, beta: float) -> np.ndarray:
        """All scores of a layer as the page sees them: (T, T), voter × token."""
        own = self.layer == layer
        query = self.query[own] * self.weight[own, None]
        scores: np.ndarray = query.T.astype(np.float32) @ self.key[own].astype(np.float32) + beta
        return scores

    def to_plain(self) -> dict[str, Any]:
        # numbers of similar size are next to each other, so that few codes fit all of them
        return {
            "query": pack(self.query, huffman=True),
            "key": pack(self.key, huffman=True),
            "layer": pack(self.layer.astype(np.uint16)),
            "weight": [float(f"{weight:.5g}") for weight in self.weight],
        }


def page_scores(votes: Votes, budget: int) -> dict[str, Any] | None:
    """The factors in at most `budget` characters, with their error; None if nothing fits."""
    factors = fit(votes, budget)
    if factors is None:
        return None
    rms, largest = error(votes, factors)
    beta = quantise(votes.beta, 1e-3)
    return {"beta": beta, "rms": rms, "largest": largest, **factors.to_plain()}


def fit(votes: Votes, budget: int) -> Factors | None:
    """The factors with the least noise that fit, or less noise than can be seen."""
    spectra = [spectrum(q, k) for q, k in zip(votes.q_int, votes.k_int, strict=True)]
    variance = float(np.mean([(s.gain**2).sum() for s in spectra]))
    if not variance:
        return None
    R = votes.q_int.shape[-1]
    low = math.log(PRECISION**2 * variance / (2 * R))
    best = rounded(spectra, math.exp(low))
    if size(best) <= budget:
        return best
    # at a noise as strong as the scores nothing is left
    high, fits = math.log(variance), None
    for _ in range(12):
        middle = (low + high) / 2
        tried = rounded(spectra, math.exp(middle))
        if size(tried) <= budget:
            high, fits = middle, tried
        else:
            low = middle
    return fits if fits is not None and len(fits.layer) else None


def spectrum(q_int: np.ndarray, k_int: np.ndarray) -> Spectrum:
    """The singular vectors of q_int·k_intᵀ, without the (T, T) product."""
    T = len(q_int)
    query, upper = np.linalg.qr(q_int.astype(np.float64))
    key, lower = np.linalg.qr(k_int.astype(np.float64))
    left, gain, right = np.linalg.svd(upper @ lower.T)
    width = math.sqrt(T)
    return Spectrum((query @ left).T * width, (key @ right.T).T * width, gain / T)


def rounded(spectra: list[Spectrum], noise: float) -> Factors:
    """Every part rounded to steps that add the variance `noise` to a score, on each side."""
    queries, keys, layers, weights, gains = [], [], [], [], []
    for layer, parts in enumerate(spectra):
        used = parts.gain**2 > 2 * noise
        gain = parts.gain[used]
        query, key = parts.query[used], parts.key[used]
        largest = np.maximum(np.abs(query).max(1, initial=0), np.abs(key).max(1, initial=0))
        # a few parts have outliers; a wider step for them costs less than a second byte for all
        step = np.maximum(math.sqrt(12 * noise) / gain, largest / 127)
        queries.append(np.round(query / step[:, None]))
        keys.append(np.round(key / step[:, None]))
        layers.append(np.full(len(gain), layer))
        weights.append(gain * step**2)
        gains.append(gain)
    order = np.argsort(-np.concatenate(gains), kind="stable")
    return Factors(
        np.concatenate(queries)[order].astype(np.int8),
        np.concatenate(keys)[order].astype(np.int8),
        np.concatenate(layers)[order],
        np.concatenate(weights)[order],
    )


def size(factors: Factors) -> int:
    """Characters in the page, but for a few hundred around them."""
    plain = factors.to_plain()
    arrays = sum(len(plain[name]["data"]) for name in ("query", "key", "layer"))
    return arrays + 12 * len(factors.weight)


def error(votes: Votes, factors: Factors) -> tuple[float, float]:
    """Root mean square and largest error over all pairs of all layers."""
    squares, largest, pairs = 0.0, 0.0, 0
    for layer, beta in enumerate(votes.beta):
        difference = factors.scores(layer, float(beta)) - votes.table(layer)  # NaN if not later
        later = difference[np.isfinite(difference)]
        squares += float(np.square(later, dtype=np.float64).sum())
        largest = max(largest, float(np.abs(later).max(initial=0)))
        pairs += later.size
    return math.sqrt(squares / max(pairs, 1)), largest
