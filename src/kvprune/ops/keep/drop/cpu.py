"""Drop steps on CPUs: stripes of keys walk through the queries, each until its last one is gone."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from kvprune.ops.jit import FASTMATH, Array, njit
from kvprune.ops.threads import use_threads
from kvprune.ops.timeline import NEVER, Timeline

# keys per task: with 64 numbers each, 128 KB, which the second-level cache holds
STRIPE = 512
# numbers of a query that are multiplied at a time: fewer passes over the sums
NUMBERS = 8


def drop_steps(
    q_int: Tensor,
    k_int: Tensor,
    beta: Tensor,
    timeline: Timeline,
    threshold: float = 0.0,
    block: int = 256,
) -> Tensor:
    """See reference.drop_steps; a key that was dropped is not scored again, whatever the block."""
    steps = torch.empty(timeline.visible_from.shape, dtype=torch.long)
    time = timeline.clock, timeline.visible_from, timeline.votable_from
    arrays = (x.detach().contiguous().numpy() for x in (q_int, k_int, *time, steps))
    use_threads()
    # β as a number: FSDP could no longer free a parameter that NumPy has seen
    _walk(np.float32(threshold), np.float32(float(beta.detach())), *arrays)
    return steps


@njit(parallel=True, cache=True, fastmath=FASTMATH)
def _walk(
    threshold: np.float32,
    beta: np.float32,
    q_int: Array,
    k_int: Array,
    clock: Array,
    visible_from: Array,
    votable_from: Array,
    steps: Array,
) -> None:
    B, T, R = q_int.shape
    S = k_int.shape[1]
    P = S - T
    stripes = (S + STRIPE - 1) // STRIPE
    wide = (R + NUMBERS - 1) // NUMBERS * NUMBERS
    for task in prange(B * stripes):
        b = task // stripes
        # every n-th key: late keys meet few queries, and each stripe has as many of them
        j = task % stripes
        alive = 0
        key_of = np.empty(STRIPE, np.int64)
        q, k = np.zeros(wide, np.float32), np.zeros((wide, STRIPE), np.float32)
        scores = np.empty(STRIPE, np.float32)
        for i in range(T):
            while j < P + i:
                steps[b, j] = NEVER if visible_from[b, j] < NEVER else j - P
                if votable_from[b, j] < NEVER:
                    k[:R, alive] = k_int[b, j]
                    key_of[alive] = j
                    alive += 1
                j += stripes
            now = clock[b, i]
            if alive == 0 or now < 0:
                continue
            q[:R] = q_int[b, i]
            if _score(q, k, beta, threshold, scores, alive) == 0:
                continue
            # from the end: a slot that becomes free goes to the last key, which was looked at
            for slot in range(alive - 1, -1, -1):
                if scores[slot] <= threshold and now >= votable_from[b, key_of[slot]]:
                    steps[b, key_of[slot]] = i
                    alive -= 1
                    key_of[slot] = key_of[alive]
                    k[:, slot] = k[:, alive]
        while j < S:
            steps[b, j] = NEVER if visible_from[b, j] < NEVER else j - P
            j += stripes


@njit(cache=True, fastmath=FASTMATH)
def _score(
    q: Array, k: Array, beta: np.float32, threshold: np.float32, scores: Array, alive: int
) -> int:
    """scores[j] = q·k[:, j] + β of the keys alive; returns how many are low enough for a drop."""
    scores[:alive] = beta
    for r in range(0, len(q), NUMBERS):
        q0, q1, q2, q3 = q[r], q[r + 1], q[r + 2], q[r + 3]
        q4, q5, q6, q7 = q[r + 4], q[r + 5], q[r + 6], q[r + 7]
        k0, k1, k2, k3 = k[r], k[r + 1], k[r + 2], k[r + 3]
        k4, k5, k6, k7 = k[r + 4], k[r + 5], k[r + 6], k[r + 7]
        for j in range(alive):
            low = q0 * k0[j] + q1 * k1[j] + q2 * k2[j] + q3 * k3[j]
            high = q4 * k4[j] + q5 * k5[j] + q6 * k6[j] + q7 * k7[j]
            scores[j] += low + high
    drops = 0
    for j in range(alive):
        drops += scores[j] <= threshold
    return drops
