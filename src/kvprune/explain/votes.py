"""Why a token was dropped: the score of every later token on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvprune.errors import PruneError
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from torch import Tensor

    from kvprune.methods.base import Method
    from kvprune.methods.interaction import Ballot


class Runners(NamedTuple):
    """The tokens that would have dropped a token too, had its dropper not: the first ones."""

    steps: np.ndarray  # (L, T, K) int32, in the order of the text; NEVER for none
    scores: np.ndarray  # (L, T, K) float32, NaN for none


@dataclass(frozen=True, eq=False)
class Votes:
    """What the tokens of a text brought to the votes of each layer.

    s[i, j] = q_int[i]·k_int[j] + β: token i drops j iff s[i, j] ≤ threshold and j is not protected.
    """

    q_int: np.ndarray  # (L, T, r) float32, divided by √r
    k_int: np.ndarray  # (L, T, r) float32
    beta: np.ndarray  # (L,) float32
    threshold: float = 0.0
    protect_first: int = 0
    protect_recent: int = 0

    def __post_init__(self) -> None:
        for name in ("q_int", "k_int", "beta"):
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=np.float32))
        q_int, k_int, beta = self.q_int, self.k_int, self.beta
        if q_int.ndim != 3 or k_int.shape != q_int.shape or beta.shape != q_int.shape[:1]:
            raise PruneError(
                f"q_int {q_int.shape}, k_int {k_int.shape} and beta {beta.shape} do not fit; votes "
                f"need (layers, tokens, rank) twice and (layers,)"
            )
        if not all(np.isfinite(part).all() for part in (q_int, k_int, beta)):
            raise PruneError("the votes hold NaN or Inf; trace the text again")

    @classmethod
    def of(cls, method: Method, ballots: list[Ballot]) -> Votes:
        """The votes of one row, from what each layer brought: (1, T, r)."""
        rule = method.protection()
        return cls(
            np.stack([_numpy(ballot.q_int[0]) for ballot in ballots]),
            np.stack([_numpy(ballot.k_int[0]) for ballot in ballots]),
            np.stack([_numpy(ballot.beta).reshape(()) for ballot in ballots]),
            float(getattr(method, "threshold", 0.0)),
            rule.first,
            rule.recent,
        )

    def scores(self, token: int, layer: int) -> np.ndarray:
        """The scores of all later tokens on this one, NaN for itself and earlier ones: (T,)."""
        scores: np.ndarray = self.q_int[layer] @ self.k_int[layer, token] + self.beta[layer]
        scores[: token + 1] = np.nan
        return scores

    def table(self, layer: int) -> np.ndarray:
        """All scores of one layer: (T, T), voter × token; NaN where the voter is not later."""
        scores: np.ndarray = self.q_int[layer] @ self.k_int[layer].T + self.beta[layer]
        scores[np.triu_indices(len(scores))] = np.nan
        return scores

    def counts(self, token: np.ndarray | int, voter: np.ndarray | int) -> np.ndarray:
        """Whether the voter's vote on the token counts: it is not protected."""
        distance = np.asarray(voter) - np.asarray(token)
        counts: np.ndarray = (distance > self.protect_recent) & (
            np.asarray(token) >= self.protect_first
        )
        return counts

    def of_drops(self, drop_step: np.ndarray) -> np.ndarray:
        """The score with which each token was dropped, NaN if it was not: (L, T)."""
        score = np.full(drop_step.shape, np.nan, dtype=np.float32)
        layer, token = np.nonzero(drop_step < NEVER)
        q_int = self.q_int[layer, drop_step[layer, token]]
        products = np.einsum("nr,nr->n", q_int, self.k_int[layer, token])
        score[layer, token] = products + self.beta[layer]
        return score

    def runners_up(self, drop_step: np.ndarray, most: int = 3) -> Runners:
        """The first `most` tokens after its dropper that vote each dropped token out, too."""
        L, T = drop_step.shape
        steps = np.full((L, T, most), NEVER, dtype=np.int32)
        scores = np.full((L, T, most), np.nan, dtype=np.float32)
        voters = np.arange(T)
        votable = self.counts(voters, voters[:, None])
        for layer in range(L):
            table = self.table(layer)
            with np.errstate(invalid="ignore"):
                drops = votable & (table <= self.threshold) & (voters[:, None] > drop_step[layer])
            place = drops.cumsum(0)  # a voter's rank among those of its column, from 1
            for k in range(most):
                found = drops & (place == k + 1)
                token = np.nonzero(found.any(0))[0]
                voter = found[:, token].argmax(0)
                steps[layer, token, k] = voter
                scores[layer, token, k] = table[voter, token]
        return Runners(steps, scores)


def _numpy(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.detach().float().cpu().numpy()
    return array
