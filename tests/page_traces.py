"""Traces with votes, losses and misses, made of random numbers."""

import numpy as np

from kvprune import NEVER
from kvprune.explain import Trace
from kvprune.explain.cost import Miss, Return
from kvprune.explain.votes import Votes
from traces import random_trace

RANK = 4


def voting_trace(
    L=3, T=60, seed=0, threshold=0.0, protect_first=0, protect_recent=4, name="adapter-80", **more
) -> Trace:
    """Drops by random votes, decided one by one."""
    rng = np.random.default_rng(seed)
    rules = {"threshold": threshold, "protect_first": protect_first,
             "protect_recent": protect_recent}  # fmt: skip
    q_int, k_int = rng.normal(size=(2, L, T, RANK)).astype(np.float32)
    beta = rng.uniform(1, 3, L).astype(np.float32)
    step = np.full((L, T), NEVER)
    for l in range(L):
        for j in range(protect_first, T):
            for i in range(j + protect_recent + 1, T):
                if float(q_int[l, i] @ k_int[l, j] + beta[l]) <= threshold:
                    step[l, j] = i
                    break
    text = random_trace(1, T, seed)
    return Trace(
        **{field: getattr(text, field) for field in ("tokens", "ids", "prompt")},
        layers=tuple(range(L)), kept_bytes=100, dense_bytes=90, model="base", drop_step=step,
        adapter=name,
        settings={"method": "pruning", **rules, "depth_tied": False},
        votes=Votes(q_int, k_int, beta, **rules), **more,
    )  # fmt: skip


def costly_trace(T=60, misses=True, **options) -> Trace:
    """One whose losses are known, and whose worst tokens are 40, 50 and 30."""
    rng = np.random.default_rng(1)
    dense = rng.uniform(0, 4, T).astype(np.float32)
    loss = dense + rng.uniform(-0.2, 0.2, T).astype(np.float32)
    for worst, more in ((40, 3.0), (50, 2.0), (30, 1.5)):
        dense[worst], loss[worst] = 2.0, 2.0 + more
    dense[0] = loss[0] = np.nan
    found = []
    for token in (40, 50, 30) if misses else ():
        at = float(loss[token])
        returns = (Return(token - 20, None, at - 1.25), Return(token - 12, 1, at - 0.5))
        found.append(Miss(token, at, 2.0, 2.1, returns))
    return voting_trace(T=T, loss=loss, dense_loss=dense, dense="base model",
                        misses=tuple(found), **options)  # fmt: skip
